// Counts and times of one answer, and the gauges that show them.

export class Meter {
  constructor() {
    this.tokens = this.rounds = this.drafted = this.verified = this.accepted = 0;
    this.started = performance.now();
  }

  add(event) {
    const now = performance.now();
    const count = event.token_ids?.length ?? 0;
    if (this.first === undefined && count) [this.first, this.firstCount] = [now, count];
    if (count) this.last = now;
    this.tokens += count;
    for (const round of event.rounds ?? []) {
      this.rounds += round.drafted > 0;
      this.drafted += round.drafted;
      this.verified += round.verified;
      this.accepted += round.accepted;
    }
    if (event.speculation) Object.assign(this, event.speculation); // the server's own totals have the last word
  }

  /** Tokens per second after the first event, so that reading the prompt does not count; undefined until known. */
  get rate() {
    const after = this.tokens - this.firstCount;
    return after > 0 ? (1000 * after) / (this.last - this.first) : undefined;
  }

  /** Tokens per drafted round, the model's own token included; undefined while nothing was drafted. */
  get length() {
    return this.rounds ? 1 + this.accepted / this.rounds : undefined;
  }

  words() {
    const parts = [`${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`];
    if (this.rate) parts.push(`${this.rate.toFixed(1)} tokens/s`);
    if (this.rounds) {
      parts.push(`acceptance length ${this.length.toFixed(2)}`);
      parts.push(`${this.accepted} accepted of ${this.verified} verified of ${this.drafted} drafted`);
    }
    return parts.join(" · ");
  }
}

export class Gauges {
  /** Show a meter; several calls before the next frame cost one. */
  show(meter) {
    this.meter = meter;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw(this.meter);
    });
  }

  draw(meter) {
    put("length", meter.length?.toFixed(2));
    put("rate", meter.rate?.toFixed(meter.rate < 100 ? 1 : 0));
    for (const name of ["drafted", "verified", "accepted"]) {
      put(name, meter.rounds ? meter[name] : undefined);
      const share = meter.drafted ? meter[name] / meter.drafted : 0;
      document.querySelector(`#funnel i.${name}`).style.transform = `scaleX(${share})`;
    }
  }
}

function put(id, value) {
  document.getElementById(id).textContent = value ?? "";
}
