// The parser of the server's metrics page, and the change between two pages.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const VALUES = { "+Inf": Infinity, "-Inf": -Infinity, NaN: NaN };

/** A page: name -> samples, each with its labels and its value. */
export function parse(text, at) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const match = SAMPLE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
    }
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: match[3] in VALUES ? VALUES[match[3]] : Number(match[3]) });
  }
  return { at, samples };
}

function matching(page, name, labels) {
  const wanted = Object.entries(labels);
  return (page.samples.get(name) || []).filter((sample) => wanted.every(([key, value]) => sample.labels[key] === value));
}

/** Return the sum of all samples of this name that have these labels; 0 if there are none. */
export function sum(page, name, labels = {}) {
  return matching(page, name, labels).reduce((total, sample) => total + sample.value, 0);
}

/** The samples by the value of one label. */
export function by(page, name, label, labels = {}) {
  return matching(page, name, labels).map((sample) => [sample.labels[label], sample.value]);
}

/** Return the upper bounds of the buckets, and the number of values in each bucket alone. */
function histogram(page, name, labels) {
  const rows = by(page, `${name}_bucket`, "le", labels)
    .map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count])
    .sort((one, two) => one[0] - two[0]);
  return { bounds: rows.map((row) => row[0]), counts: rows.map((row, index) => row[1] - (index ? rows[index - 1][1] : 0)) };
}

/** Estimate the quantile `share` by linear interpolation within its bucket; NaN without values. */
function quantileOf({ bounds, counts }, share) {
  const wanted = share * counts.reduce((total, count) => total + count, 0);
  let seen = 0;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && seen + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      const high = Number.isFinite(bounds[index]) ? bounds[index] : low;
      return low + ((high - low) * (wanted - seen)) / counts[index];
    }
    seen += counts[index];
  }
  return NaN;
}

/** The change of a model's metrics between two pages; a counter that fell was restarted, so its gain counts from 0. */
export class Change {
  constructor(before, after, model) {
    this.before = before;
    this.after = after;
    this.labels = { model_name: model };
  }

  get seconds() {
    return Math.max(1e-9, this.after.at - this.before.at);
  }

  gain(name, more = {}) {
    const labels = { ...this.labels, ...more };
    const [before, after] = [sum(this.before, name, labels), sum(this.after, name, labels)];
    return after >= before ? after - before : after;
  }

  rate(name, more = {}) {
    return this.gain(name, more) / this.seconds;
  }

  /** Return the gain of one counter over that of another; NaN if the other gained nothing. */
  share(part, whole) {
    const total = this.gain(whole);
    return total > 0 ? this.gain(part) / total : NaN;
  }

  now(name, more = {}) {
    return sum(this.after, name, { ...this.labels, ...more });
  }

  quantile(name, share) {
    const after = histogram(this.after, name, this.labels);
    const before = histogram(this.before, name, this.labels);
    const isOlder = before.counts.length === after.counts.length && before.counts.every((count, index) => count <= after.counts[index]);
    if (isOlder) after.counts = after.counts.map((count, index) => count - before.counts[index]);
    return quantileOf(after, share);
  }

  get state() {
    const states = by(this.after, "inferc_model_state", "state", this.labels);
    return (states.find(([, value]) => value === 1) || ["unknown"])[0];
  }

  /** Requests that were over, a second, without those that were refused. */
  get over() {
    const name = "inferc_requests_total";
    return this.rate(name) - this.rate(name, { outcome: "refused" });
  }

  get busy() {
    return Math.min(1, this.rate("inferc_device_busy_seconds_total"));
  }

  /** The share of the machine's processors that were busy, with all programs. */
  get cpu() {
    const [before, after] = [this.before, this.after].map((page) => sum(page, "inferc_host_cpu_busy_seconds_total"));
    return Math.min(1, (after - before) / this.seconds / sum(this.after, "inferc_host_cpus"));
  }

  /** The share of the machine's memory that is taken. */
  get memory() {
    return 1 - sum(this.after, "inferc_host_memory_available_bytes") / sum(this.after, "inferc_host_memory_bytes");
  }

  get batchFill() {
    const places = this.now("inferc_sequences_max");
    return places ? this.share("inferc_step_sequences_total", "inferc_steps_total") / places : NaN;
  }
}
