// One answer on the page: tokens as they come, each marked by what became of it.
import { element } from "./dom.js";

const SOURCES = ["accepted", "corrected", "bonus", "plain"];

export class Answer {
  /** `title` names the run where there are several; `card` shows a token when it is pointed at. */
  constructor(title, card) {
    this.card = card;
    this.tokens = []; // {round, place, element}: `place` is the token's index in its round
    this.ids = [];
    this.text = "";
    this.shown = 0; // characters of `text` that are on the page
    this.box = element("div", "text");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Answer; arrow keys go through its tokens");
    this.stats = element("p", "stats");
    this.element = element("section", "answer");
    this.element.append(...(title ? [element("h3", "", title)] : []), this.box, this.stats);
    this.listen();
  }

  /** Take over an event; returns its rounds with the element of each. */
  add(event) {
    this.text += event.text ?? "";
    this.ids.push(...(event.token_ids ?? []));
    return (event.rounds ?? []).map((round) => ({ round, element: this.addRound(round) }));
  }

  addRound(round) {
    const group = element("span", "round");
    round.tokens.forEach((token, place) => {
      // A stop string cuts the text inside a token: what was not sent is not shown.
      const text = token.text.slice(0, this.text.length - this.shown);
      this.shown += text.length;
      const span = tokenElement(text, SOURCES.includes(token.source) ? token.source : "plain");
      span.dataset.index = this.tokens.length;
      this.tokens.push({ round, place, element: span });
      group.append(span);
    });
    this.box.append(group);
    return group;
  }

  /** The end: `words` go below, and text without a token of its own (half a character) is shown. */
  finish(words) {
    this.box.append(this.text.slice(this.shown));
    this.shown = this.text.length;
    this.stats.textContent = words;
  }

  fail(words) {
    this.element.append(element("p", "failure", words));
    this.element.lastChild.setAttribute("role", "alert");
  }

  listen() {
    this.box.addEventListener("pointerover", (event) => {
      const span = event.target.closest(".token");
      if (span) this.point(Number(span.dataset.index));
    });
    // A finger lifted is not a finger gone elsewhere: the card stays until something else is touched.
    this.box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    this.box.addEventListener("blur", () => this.leave());
    this.box.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
      const step = steps[event.key];
      if (step === undefined || !this.tokens.length) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(this.tokens.length - 1, (this.current ?? -1) + step)));
      this.tokens[this.current].element.scrollIntoView({ block: "nearest" });
    });
  }

  point(index) {
    this.leave();
    this.current = index;
    const token = this.tokens[index];
    token.element.classList.add("current");
    token.element.parentElement.classList.add("current");
    this.card.showToken(token.element, token.round, token.place);
  }

  leave() {
    this.box.querySelectorAll(".current").forEach((item) => item.classList.remove("current"));
    this.card.hide();
  }
}

function tokenElement(text, source) {
  const span = element("span", `token ${source}`);
  const word = text.trimStart();
  span.append(text.slice(0, text.length - word.length), element("span", "mark", word));
  return span;
}
