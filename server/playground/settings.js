// The settings of the form, kept between visits.

const STORED = "dspark.settings";

export class Settings {
  constructor(form, box) {
    this.form = form;
    this.box = box;
    box.open = matchMedia("(min-width: 52rem)").matches;
    const kept = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    for (const [name, value] of Object.entries(kept)) if (form.elements[name]) form.elements[name].value = value;
    form.addEventListener("input", () => {
      localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(new FormData(form))));
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** False, with the field at fault shown, when the browser finds a value that cannot be sent. */
  valid() {
    if (this.form.checkValidity()) return true;
    this.box.open = true;
    return this.form.reportValidity();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** The request's fields; one left empty is left out. */
  fields() {
    const names = ["temperature", "top_p", "max_tokens", "seed"];
    const given = names.filter((name) => this.form.elements[name].value !== "");
    const numbers = given.map((name) => [name, Number(this.form.elements[name].value)]);
    return { ...Object.fromEntries(numbers), speculative: this.form.elements.speculative.value === "full" ? "full" : true };
  }
}

/** Whether two runs of a request must give the same text. */
export function repeatable(fields) {
  return fields.temperature === 0 || fields.seed !== undefined;
}
