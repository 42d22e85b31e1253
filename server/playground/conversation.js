// The turns: what was asked, the answers, and, where two runs are compared, what came of it.
import { Answer } from "./answer.js";
import { generate } from "./client.js";
import { element } from "./dom.js";
import { Meter } from "./meter.js";
import { repeatable } from "./settings.js";

const NEAR = 60; // pixels from the end within which the page follows the text
const STOPPED = "stopped";
const FOLLOWS = "The same again without the draft, after the first run so that neither slows the other.";

export class Conversation {
  constructor(box, { card, strip, gauges, settings }) {
    Object.assign(this, { box, card, strip, gauges, settings });
    this.messages = [];
  }

  get running() {
    return this.abort !== undefined;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.abort = undefined;
    this.messages = [];
    this.box.querySelectorAll(".turn").forEach((turn) => turn.remove());
    this.strip.clear();
    this.gauges.show(new Meter());
  }

  /** Ask and show the answer. Returns the error, if there was one, and whether there is an answer all the same. */
  async ask(text, mode, compare) {
    const abort = (this.abort = new AbortController());
    const question = { role: "user", content: text };
    const body = { ...this.prompt(question, mode), ...this.settings.fields(), stream: true, detail: true };
    const turn = this.addTurn(text, mode, compare);
    let answered = false;
    this.box.setAttribute("aria-busy", "true");
    try {
      const first = await this.run(turn, body, abort.signal, compare ? "with the draft" : "");
      answered = true;
      if (this.abort === abort && mode === "chat" && first.answer.text) {
        this.messages.push(question, { role: "assistant", content: first.answer.text });
      }
      if (compare && !abort.signal.aborted) await this.runPlain(turn, body, abort.signal, first);
      return { answered };
    } catch (failure) {
      return { answered, failure };
    } finally {
      if (this.abort === abort) this.abort = undefined;
      this.box.setAttribute("aria-busy", "false");
    }
  }

  prompt(question, mode) {
    if (mode !== "chat") return { prompt: question.content };
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return { messages: [...system, ...this.messages, question] };
  }

  addTurn(text, mode, compare) {
    const turn = element("article", `turn ${mode}`);
    turn.append(element("p", "question", text), element("div", compare ? "answers two" : "answers"));
    this.box.append(turn);
    this.box.scrollTop = this.box.scrollHeight;
    return turn;
  }

  /** One request, shown as it comes. A stop by the user is an end like another; an error is shown and thrown. */
  async run(turn, body, signal, title) {
    const answer = new Answer(title, this.card);
    const meter = new Meter();
    answer.element.classList.add("waiting");
    this.follow(() => turn.querySelector(".answers").append(answer.element));
    let reason;
    try {
      for await (const event of generate(body, signal)) {
        this.take(answer, meter, event, body.speculative !== false);
        reason = event.finish_reason ?? reason;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.follow(() => answer.fail(error.message));
        throw error;
      }
      reason = STOPPED;
    } finally {
      answer.element.classList.remove("waiting");
      this.follow(() => answer.finish(summary(meter, reason, body)));
    }
    return { answer, meter, reason };
  }

  take(answer, meter, event, speculative) {
    this.follow(() => {
      const rounds = answer.add(event);
      if (speculative) rounds.forEach(({ round, element: tokens }) => this.strip.add(round, tokens));
    });
    answer.element.classList.remove("waiting");
    meter.add(event);
    if (speculative) this.gauges.show(meter);
  }

  /** The same request decoded plainly. It begins when the first has ended: at once, they would slow each other. */
  async runPlain(turn, body, signal, first) {
    const verdict = element("p", "verdict", FOLLOWS);
    this.follow(() => turn.append(verdict));
    const plain = await this.run(turn, { ...body, speculative: false }, signal, "plain decoding");
    this.follow(() => (verdict.textContent = judgement(first, plain, repeatable(body), body.speculative === "full")));
    verdict.classList.toggle("same", sameText(first, plain));
  }

  /** Change the page; where its end was in view, it stays in view. */
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.box.scrollTop = this.box.scrollHeight;
  }
}

function summary(meter, reason, body) {
  const ends = { length: "ended at max tokens", [STOPPED]: STOPPED };
  const parts = [meter.words()];
  if (ends[reason]) parts.push(ends[reason]);
  if (body.speculative !== false && meter.tokens > 1 && !meter.rounds) {
    parts.push("nothing was drafted: on this server no draft pays at present; the settings can ask for one all the same");
  }
  return parts.join(" · ");
}

const sameText = (first, plain) => String(first.answer.ids) === String(plain.answer.ids);

function judgement(first, plain, mustAgree, forced) {
  if (first.reason === STOPPED || plain.reason === STOPPED) return "Stopped, so the two runs cannot be compared.";
  const factor = first.meter.rate / plain.meter.rate;
  const how = forced ? "with whole blocks, whatever they cost" : "with the draft";
  const speed = factor ? ` Tokens/s ${how}: ${factor.toFixed(2)} times plain, one run after the other.` : "";
  if (sameText(first, plain)) return `Identical: ${first.answer.ids.length} tokens, one for one.${speed}`;
  const place = first.answer.ids.findIndex((id, index) => id !== plain.answer.ids[index]);
  const differs = `The texts differ from token ${1 + (place < 0 ? first.answer.ids.length : place)} on`;
  const reason = mustAgree
    ? ": in bfloat16 or on a GPU nearly tied tokens may"
    : ", as samples do; temperature 0 or a seed makes them the same";
  return `${differs}${reason}.${speed}`;
}
