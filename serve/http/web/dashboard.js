// What goes on in the server, from its page of metrics, once a second.

import { getText } from "./api.js";
import { Chart } from "./charts.js";
import { $, duration, el, number, percent, scaled } from "./dom.js";
import { Change, by, parse, sum } from "./prometheus.js";
import { RequestTable } from "./requests.js";

const EVERY_MS = 1000;
const KEPT_SECONDS = 3600;
const WINDOW_SECONDS = 10; // the period over which rates and quantiles are computed
const TTFT = "inferc_time_to_first_token_seconds";
const TBT = "inferc_time_between_tokens_seconds";
const QUANTILES = [0.5, 0.9, 0.99];
const LIMITS = { ttft: 0.5, kv: 0.9, goodput: 0.9, memory: 0.9 }; // as the alert rules have them

const quantiles = (name) => (change) => QUANTILES.map((share) => change.quantile(name, share));
const CHARTS = [
  { title: "Time to first token (TTFT)", help: "of 10 s", names: ["p50", "p90", "p99"], format: duration, limit: { value: LIMITS.ttft, text: "500 ms" }, values: quantiles(TTFT) },
  { title: "Time between tokens (TBT)", help: "of 10 s", names: ["p50", "p90", "p99"], format: duration, values: quantiles(TBT) },
  { title: "Throughput", help: "tokens a second", names: ["output", "prompts"], format: scaled, values: (change) => [change.rate("inferc_output_tokens_total"), change.rate("inferc_prompt_tokens_total")] },
  { title: "Queue", help: "sequences", names: ["running", "waiting"], format: number, values: (change) => [change.now("inferc_sequences_running"), change.now("inferc_sequences_waiting")] },
  { title: "Requests", help: "a second", names: ["over", "refused"], format: number, values: (change) => [change.over, change.rate("inferc_requests_refused_total")] },
  { title: "KV cache", help: "blocks in use", names: ["in use"], format: percent, top: 1, limit: { value: LIMITS.kv, text: "90 %" }, values: (change) => [change.now("inferc_kv_usage_ratio")] },
  { title: "Device and batch", help: "time with a step, places taken", names: ["device busy", "batch filled"], format: percent, top: 1, values: (change) => [change.busy, change.batchFill] },
  { title: "Machine", help: "processors busy, memory taken", names: ["processors", "memory"], format: percent, top: 1, limit: { value: LIMITS.memory, text: "90 %" }, values: (change) => [change.cpu, change.memory] },
  { title: "Goodput", help: "requests within their objectives", names: ["good"], format: percent, top: 1, values: (change) => [change.share("inferc_requests_good_total", "inferc_requests_judged_total")] },
  { title: "Prefix cache", help: "prompt tokens found there", names: ["hits"], format: percent, top: 1, values: (change) => [change.share("inferc_prefix_cache_hit_tokens_total", "inferc_prefix_cache_queried_tokens_total")] },
];

export class Dashboard {
  /** onState(state, problem) is called after every request for the metrics. */
  constructor(onState) {
    this.model = null;
    this.pages = []; // of the last WINDOW_SECONDS
    this.history = []; // {at, values: by chart}
    this.past = []; // the server's own pages of the last hour, from before this page was opened
    this.onState = onState;
    this.isPaused = false;
    this.requests = new RequestTable($("open"));
    this.charts = CHARTS.map((each) => new Chart(each));
    $("charts").replaceChildren(...this.charts.map((chart) => chart.node));
    $("span").addEventListener("change", () => this.#draw());
    $("pause").addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      $("pause").setAttribute("aria-pressed", String(this.isPaused));
      $("pause").textContent = this.isPaused ? "Go on" : "Pause";
    });
    this.#loop();
  }

  setModel(model) {
    if (model !== this.model) this.history = rowsOf(this.past, model);
    this.model = model;
  }

  /** Begin with what the server has kept of the time before this page was opened. */
  async #begin() {
    try {
      this.past = pagesOf(await getText("/metrics/history"));
    } catch {
      return; // what goes on now is shown all the same
    }
    this.history = [...rowsOf(this.past, this.model), ...this.history];
  }

  async #loop() {
    let hasBegun = false;
    for (;;) {
      if (!document.hidden && this.model) {
        if (!hasBegun) await this.#begin();
        hasBegun = true;
        await this.look();
      }
      await new Promise((done) => setTimeout(done, EVERY_MS));
    }
  }

  /** Fetch the metrics once, and show them. */
  async look() {
    let page;
    try {
      page = parse(await getText("/metrics"), performance.now() / 1000);
    } catch (error) {
      this.onState("unknown", error.status === 401 ? "" : error.message);
      return;
    }
    this.pages = this.pages.filter((each) => page.at - each.at <= WINDOW_SECONDS);
    const before = this.pages[0];
    this.pages.push(page);
    const change = new Change(before || page, page, this.model);
    this.onState(change.state, "");
    if (!this.isPaused && !$("dashboard").hidden) this.requests.look();
    if (!before) return;
    const values = CHARTS.map((chart) => chart.values(change));
    this.history = this.history.filter((row) => page.at - row.at <= KEPT_SECONDS);
    this.history.push({ at: page.at, values });
    if (!this.isPaused) {
      this.#tiles(change);
      this.#counts(page);
      this.#draw();
    }
  }

  #draw() {
    if ($("dashboard").hidden) return;
    const seconds = this.history.length ? this.history[this.history.length - 1].at - this.history[0].at : 0;
    const chosen = Number($("span").value);
    const span = Math.min(chosen, Math.max(60, 30 * Math.ceil(seconds / 30))); // the axis grows with what there is
    this.charts.forEach((chart, index) => {
      chart.show(this.history.map((row) => ({ at: row.at, values: row.values[index] })), span);
    });
    $("dashboard-note").textContent = seconds < chosen ? `All that the server has kept: ${Math.round(seconds)} s` : "";
  }

  show() {
    this.#draw();
    this.requests.look();
  }

  #tiles(change) {
    const ttft = change.quantile(TTFT, 0.9);
    const kv = change.now("inferc_kv_usage_ratio");
    const good = change.share("inferc_requests_good_total", "inferc_requests_judged_total");
    const rows = [
      ["State", change.state, change.state !== "serving" && change.state !== "asleep" ? "not serving" : ""],
      ["Requests", `${number(change.over)} /s`],
      ["Tokens out", `${scaled(change.rate("inferc_output_tokens_total"))} /s`],
      ["TTFT, p90", duration(ttft), ttft > LIMITS.ttft ? "high" : ""],
      ["TBT, p90", duration(change.quantile(TBT, 0.9))],
      ["Running, waiting", `${number(change.now("inferc_sequences_running"))}, ${number(change.now("inferc_sequences_waiting"))} of ${number(change.now("inferc_sequences_max"))}`],
      ["KV cache", percent(kv), kv > LIMITS.kv ? "nearly full" : ""],
      ["Goodput", percent(good), good < LIMITS.goodput ? "low" : ""],
    ];
    $("tiles").replaceChildren(
      ...rows.map(([name, value, problem]) =>
        el("div", { class: problem ? "tile problem" : "tile" }, el("dt", {}, name), el("dd", {}, value, problem ? el("span", { class: "why" }, ` ▲ ${problem}`) : ""))),
    );
  }

  #counts(page) {
    const labels = { model_name: this.model };
    const list = (title, rows) =>
      el("section", { class: "card" }, el("h2", {}, title), el("dl", { class: "facts-list" }, ...(rows.length ? rows : [["none", ""]]).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value === "" ? "" : number(value))])));
    const restarts = sum(page, "inferc_engine_restarts_total", labels);
    $("counts").replaceChildren(
      list("Requests that are over", by(page, "inferc_requests_total", "outcome", labels)),
      list("Refused", by(page, "inferc_requests_refused_total", "reason", labels)),
      list("Engine", [
        ["started again", restarts],
        ["preemptions", sum(page, "inferc_preemptions_total", labels)],
        ["cached blocks that made room", sum(page, "inferc_prefix_cache_evicted_blocks_total", labels)],
        ["steps", sum(page, "inferc_steps_total", labels)],
      ]),
      list("Server", [
        ["event loop late by, ms", 1000 * sum(page, "inferc_event_loop_lag_seconds")],
        ["requests open", sum(page, "inferc_requests_open", labels)],
      ]),
    );
  }
}

/** The server's own history: pages with their times on this page's clock. */
function pagesOf(text) {
  const [head, ...parts] = text.split(/^# at /m);
  const now = Number((/^# now (\S+)/m.exec(head) || [])[1]);
  const here = performance.now() / 1000;
  return parts.map((part) => {
    const end = part.indexOf("\n");
    return parse(part.slice(end + 1), here - (now - Number(part.slice(0, end))));
  });
}

/** What the charts show of pages, each compared with the one before it. */
function rowsOf(pages, model) {
  return pages.slice(1).map((page, index) => {
    const change = new Change(pages[index], page, model);
    return { at: page.at, values: CHARTS.map((chart) => chart.values(change)) };
  });
}
