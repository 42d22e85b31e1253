// The strip of rounds: a column for each, as high as its block. A new round touches one element and drops one.
import { element } from "./dom.js";

const NEWEST = 200;

export class Strip {
  constructor(box, card) {
    this.box = box;
    this.card = card;
    this.entries = []; // {round, element, tokens}, the newest first, as on the page
    this.highest = 1;
    box.addEventListener("pointerover", (event) => {
      const index = this.entries.findIndex((entry) => entry.element === event.target);
      if (index >= 0) this.point(index);
    });
    box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    box.addEventListener("blur", () => this.leave());
    box.addEventListener("keydown", (event) => this.key(event));
  }

  /** `tokens`: the element of the round's tokens, lit together with the column. */
  add(round, tokens) {
    const column = element("i", round.drafted ? "column" : "column plain");
    column.style.setProperty("--drafted-count", round.drafted);
    column.style.setProperty("--verified-count", round.verified);
    column.style.setProperty("--accepted-count", round.accepted);
    if (round.drafted > this.highest) {
      this.highest = round.drafted;
      this.box.style.setProperty("--highest", this.highest);
    }
    this.box.prepend(column); // rows run from right to left: the newest stays in view
    this.entries.unshift({ round, element: column, tokens });
    if (this.entries.length > NEWEST) this.entries.pop().element.remove();
  }

  clear() {
    this.leave();
    this.entries = [];
    this.box.replaceChildren();
  }

  key(event) {
    const steps = { ArrowLeft: 1, ArrowRight: -1, Home: Infinity, End: -Infinity };
    const step = steps[event.key];
    if (step === undefined || !this.entries.length) return;
    event.preventDefault();
    const from = this.entries.findIndex((entry) => entry === this.current);
    const start = from < 0 && step > 0 ? -1 : from;
    this.point(Math.max(0, Math.min(this.entries.length - 1, start + step)));
  }

  point(index) {
    this.leave();
    this.current = this.entries[index];
    this.current.element.classList.add("current");
    this.current.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.current.tokens.classList.add("current");
    this.card.showRound(this.current.element, this.current.round);
  }

  leave() {
    this.current?.element.classList.remove("current");
    this.current?.tokens.classList.remove("current");
    this.card.hide();
  }
}
