// Whether the server is there: asked now and then, and every second while it is not.
import { ServerError, health } from "./client.js";

const SECOND = 1000;

export class Connection {
  /** `onChange(trouble)`: the words to show, or "" when all is well; called on every change and once at the start. */
  constructor(onChange) {
    this.onChange = onChange;
    this.trouble = undefined;
    document.addEventListener("visibilitychange", () => !document.hidden && this.check());
    this.check();
  }

  get well() {
    return this.trouble === "";
  }

  /** Ask now. Later questions follow by themselves. */
  async check() {
    clearTimeout(this.timer);
    this.tell(await trouble());
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), document.hidden || this.well ? 20 * SECOND : SECOND);
  }

  tell(words) {
    if (words === this.trouble) return;
    this.trouble = words;
    this.onChange(words);
  }
}

async function trouble() {
  try {
    await health();
    return "";
  } catch (error) {
    if (error instanceof ServerError && error.status > 0) return `The server cannot serve: ${error.message}.`;
    return "The server does not answer. Trying again every second; this page goes on when it is back.";
  }
}
