// The small card beside a token or a round: what was drafted, how sure the draft was, what became of it.
import { element, percent, visible } from "./dom.js";

const GAP = 8; // pixels between the card, what it explains, and the edges of the window

export class Card {
  constructor(box) {
    this.box = box;
  }

  showToken(anchor, round, place) {
    const token = round.tokens[place];
    const title = element("p", "title");
    title.append(element("b", "", visible(token)), element("span", `source ${token.source}`, token.source));
    this.show(anchor, title, element("p", "", story(round, place)), slots(round, place));
  }

  showRound(anchor, round) {
    const title = element("p", "title");
    title.append(element("b", "", round.drafted ? "Round" : "Plain step"));
    const counts = `drafted ${round.drafted}, verified ${round.verified}, accepted ${round.accepted}`;
    const text = round.tokens.map((token) => token.text).join("");
    this.show(anchor, title, element("p", "", round.drafted ? counts : "nothing drafted"), slots(round),
      element("p", "produced", `gave “${visible({ ...round.tokens[0], text })}”`));
  }

  show(anchor, ...content) {
    this.box.replaceChildren(...content);
    this.box.hidden = false;
    this.anchor = anchor;
    this.place();
  }

  place() {
    const target = this.anchor.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    const left = Math.min(target.left, innerWidth - width - GAP);
    const fitsBelow = target.bottom + GAP + height < innerHeight;
    const top = fitsBelow ? target.bottom + GAP : target.top - GAP - height;
    this.box.style.left = `${Math.max(GAP, left)}px`;
    this.box.style.top = `${Math.max(GAP, top)}px`;
  }

  /** After a scroll: go along with the anchor, or hide when it has left the view. */
  follow() {
    if (this.box.hidden) return;
    const target = this.anchor.getBoundingClientRect();
    const view = this.anchor.closest("#conversation, #strip").getBoundingClientRect();
    const high = target.bottom > view.top && target.top < view.bottom;
    const wide = target.right > view.left && target.left < view.right;
    if (high && wide) this.place();
    else this.hide();
  }

  hide() {
    this.box.hidden = true;
  }
}

/** One sentence on a token. */
function story(round, place) {
  const slot = `slot ${place + 1} of ${round.drafted}`;
  const draft = round.draft[place];
  switch (round.tokens[place].source) {
    case "accepted":
      return `${slot}${sure(draft)}`;
    case "corrected":
      return `${slot}: the draft said “${visible(draft)}”${sure(draft)}`;
    case "bonus":
      return `the model’s next token, after all of the ${round.verified} verified drafts stood`;
    default:
      return round.drafted
        ? "the model’s own token; no draft was worth verifying"
        : "a step of the model without a draft";
  }
}

const sure = (draft) => (draft.confidence === null ? "" : `, confidence ${percent(draft.confidence)}`);

/** The block as a list, the slot of token `place` marked. */
function slots(round, place) {
  const list = element("ol", "slots");
  round.draft.forEach((draft, index) => {
    const state = fate(round, index);
    const item = element("li", `${state.name}${index === place ? " here" : ""}`);
    const bar = element("i");
    bar.style.setProperty("--share", draft.confidence ?? 0);
    const confidence = draft.confidence === null ? "" : percent(draft.confidence);
    item.append(element("span", "draft", visible(draft)), bar, element("span", "number", confidence),
      element("span", "fate", state.words));
    list.append(item);
  });
  return list;
}

function fate(round, index) {
  if (index < round.accepted) return { name: "accepted", words: "✓ accepted" };
  if (index >= round.verified) return { name: "unsent", words: "not verified" };
  const rejected = round.tokens.some((token) => token.source === "corrected");
  if (!rejected) return { name: "after", words: "after the end" };
  if (index === round.accepted) return { name: "rejected", words: "✗ rejected" };
  return { name: "after", words: "after a rejection" };
}
