// The operators' page: how far behind fan-out is, and what is done about it; asked for once a second.

import { call, Problem, session } from "./api.js";
import { announce, confirmed, count, h, icon, logo, svg, toast } from "./dom.js";

const TOKEN = "starling.operator";
const POLL_MS = 1_000;
const STALE_MS = 4_000;
const POINTS_MAX = 180;
const DEFAULT_LEAST = 10_000;
const TOPICS = {
  "tweet-fanout": "Tweets",
  "fanout-tasks": "Buckets of big authors",
  "fanout-tasks-slow": "What may wait",
};

const app = document.getElementById("app");

// Every request of api.js speaks for this page's own token.
Object.defineProperty(session, "token", { get: () => sessionStorage.getItem(TOKEN) });

function signIn(message = "") {
  const error = h("p.error", { role: "alert" }, message);
  const input = h("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    required: true,
    "aria-describedby": "how",
  });
  const form = h(
    "form",
    {},
    h("label", { htmlFor: "token" }, "Operator's token"),
    input,
    error,
    h("button.primary.wide", { type: "submit" }, "Sign in"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, input.value.trim());
    try {
      await call("GET", "/fanout/policy");
      start();
    } catch (problem) {
      sessionStorage.removeItem(TOKEN);
      const wrong = { 401: "This token isn't valid, or it has expired.", 403: "This token isn't an operator's." };
      error.textContent = wrong[problem.status] ?? problem.message;
    }
  });
  const panel = h(
    "div.panel",
    {},
    logo(),
    h("h1", {}, "Operations"),
    form,
    h("p.how", { id: "how" }, "Where the mesh runs, this prints a token:"),
    h("pre", { tabIndex: 0, ariaLabel: "Command" }, "starling token operator"),
    h("p.how", {}, h("a", { href: "/" }, "To the timelines")),
  );
  app.replaceChildren(h("main.sign-in", { id: "main" }, panel));
}

/** A bounded row of numbers over time, drawn as a line. */
class Series {
  constructor(label) {
    this.points = [];
    this.area = svg("polygon", { class: "area" });
    this.line = svg("polyline", { class: "line" });
    this.element = svg(
      "svg",
      { class: "spark", viewBox: "0 0 180 44", preserveAspectRatio: "none", role: "img", "aria-label": label },
      this.area,
      this.line,
    );
  }

  add(value, least = 1) {
    this.points.push(value);
    if (this.points.length > POINTS_MAX) this.points.shift();
    const top = Math.max(least, ...this.points) * 1.1;
    const from = POINTS_MAX - this.points.length;
    const at = this.points.map((point, index) => `${from + index},${(43 - (point / top) * 41).toFixed(1)}`);
    this.line.setAttribute("points", at.join(" "));
    this.area.setAttribute("points", `${from},44 ${at.join(" ")} ${POINTS_MAX - 1},44`);
  }
}

/** A figure with its name, what it means, and maybe its past. */
function tile(name, series = null) {
  const value = h("p.value", {}, "–");
  const note = h("p.tile-note", {});
  const element = h("section.tile", { ariaLabel: name }, h("h2", {}, name), value, note, series?.element);
  const show = (text, more = "", level = "") => {
    value.textContent = text;
    note.textContent = more;
    element.dataset.level = level;
  };
  return { element, show };
}

function seconds(number) {
  if (number < 0.001) return "0 s";
  return number < 1 ? `${Math.round(number * 1_000)} ms` : `${number.toFixed(number < 10 ? 1 : 0)} s`;
}

function exactly(number) {
  return Number(number).toLocaleString("en");
}

function start() {
  const series = {
    lag: new Series("Lag in the last three minutes"),
    rate: new Series("Deliveries per second in the last three minutes"),
    threshold: new Series("Threshold in the last three minutes"),
  };
  const tiles = {
    lag: tile("Lag", series.lag),
    rate: tile("Deliveries per second", series.rate),
    threshold: tile("Authors are pulled from", series.threshold),
    mode: tile("Mode"),
    pulled: tile("Authors pulled now"),
    delay: tile("Post to list"),
    dead: tile("Dead letters"),
    retries: tile("Tried again"),
  };
  const fresh = h("p.fresh", { role: "status" }, "Asking…");
  const partitions = h("div.topics", {});
  const workers = h("tbody", {});
  const policy = policyForm();
  const leave = () => {
    polling.abort();
    sessionStorage.removeItem(TOKEN);
    signIn();
  };
  app.replaceChildren(
    h(
      "div.ops",
      {},
      h(
        "header.ops-head",
        {},
        h("a.brand", { href: "/", ariaLabel: "Starling, home" }, logo()),
        h("h1", {}, "Operations"),
        fresh,
        h("button.quiet", { type: "button", onclick: leave }, "Sign out"),
      ),
      h(
        "main",
        { id: "main" },
        h(
          "div.tiles",
          {},
          Object.values(tiles).map(({ element }) => element),
        ),
        h("section.sheet", { ariaLabel: "Lag per partition" }, h("h2", {}, "Lag per partition"), partitions),
        h("div.halves", {}, workerTable(workers), policy.element),
      ),
    ),
  );
  const seen = { at: Date.now(), workers: new Map(), partitions, body: workers };
  const polling = poll(async () => {
    const [status, now] = await Promise.all([call("GET", "/fanout/status"), call("GET", "/fanout/policy")]);
    seen.at = Date.now();
    show(status, now, { tiles, series, seen });
    policy.show(now.policy);
  });
  const watching = setInterval(() => {
    const stale = Date.now() - seen.at > STALE_MS;
    const text = stale ? `No answer for ${Math.round((Date.now() - seen.at) / 1_000)} s: what you see is old` : "Live";
    if (stale && !document.body.classList.contains("stale")) announce("No answer: what you see is old");
    document.body.classList.toggle("stale", stale);
    if (fresh.textContent !== text) fresh.textContent = text;
  }, 500);
  polling.signal.addEventListener("abort", () => clearInterval(watching));
}

/** Does it each second, one at a time, until told to stop, or the token is none any more. */
function poll(work) {
  const stopping = new AbortController();
  (async () => {
    while (!stopping.signal.aborted) {
      try {
        if (!document.hidden) await work();
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        if ([401, 403].includes(error.status)) {
          stopping.abort();
          sessionStorage.removeItem(TOKEN);
          return signIn("Your session is over. Sign in again.");
        }
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  })();
  return stopping;
}

function show(status, { policy, pressure = {}, pulledAuthors = 0 }, { tiles, series, seen }) {
  const partitions = status.partitions ?? [];
  const lag = Math.max(0, ...partitions.map((one) => one.lagSeconds ?? 0));
  const waiting = partitions.reduce((sum, one) => sum + Number(one.lagMessages ?? 0), 0);
  const level = lag > 30 ? "bad" : lag > 5 ? "warn" : "good";
  series.lag.add(lag);
  tiles.lag.show(seconds(lag), `${count(waiting)} records wait; the oldest is so old`, level);

  const rate = rates(status.worker ?? {}, seen);
  series.rate.add(rate);
  tiles.rate.show(count(Math.round(rate)), "by the worker that answers");

  const threshold = Number(pressure.pullThreshold ?? policy.pullThreshold);
  const lowered = threshold < Number(policy.pullThreshold);
  series.threshold.add(threshold);
  const of = lowered ? `lowered by lag from ${exactly(policy.pullThreshold)}` : "followers, as the policy says";
  tiles.threshold.show(exactly(threshold), of, lowered ? "warn" : "");

  const [mode, means, how] = modeOf(pressure, lowered);
  tiles.mode.show(mode, `${means}; ${changes(pressure.changes)}`, how);
  const pulled = Number(pulledAuthors);
  tiles.pulled.show(count(pulled), pulled ? "their readers pull them; all others are pushed" : "everybody is pushed");

  const delay = status.worker?.delay ?? {};
  tiles.delay.show(seconds(delay.p99Seconds ?? 0), `99 of 100; half within ${seconds(delay.p50Seconds ?? 0)}`);
  const dead = Number(status.deadLetters ?? 0);
  tiles.dead.show(
    count(dead),
    dead ? "look at the topic fanout-dead-letters" : "nothing was given up",
    dead ? "bad" : "good",
  );
  tiles.retries.show(count(Number(status.worker?.retries ?? 0)), "what was unavailable for a moment");

  drawPartitions(seen.partitions, partitions);
  drawWorkers(seen);
}

function modeOf({ bigTasksSlow }, lowered) {
  if (lowered) return ["Shedding", "big authors who post are pulled sooner", "warn"];
  if (bigTasksSlow) return ["Big ones wait", "big authors' tasks are on the slow topic", "warn"];
  return ["Normal", "all below the threshold are pushed", "good"];
}

function changes(number) {
  return Number(number ?? 0) === 1
    ? "lag changed the threshold once"
    : `lag changed the threshold ${count(Number(number ?? 0))} times`;
}

/** Deliveries per second, from the counters of each worker that has answered. */
function rates(worker, seen) {
  const now = performance.now();
  const before = seen.workers.get(worker.name);
  const deliveries = Number(worker.deliveries ?? 0);
  const rate = before ? (Math.max(0, deliveries - before.deliveries) * 1_000) / (now - before.at) : 0;
  if (worker.name) seen.workers.set(worker.name, { at: now, deliveries, rate, worker });
  while (seen.workers.size > 16) seen.workers.delete(seen.workers.keys().next().value);
  return rate;
}

function drawPartitions(place, partitions) {
  const names = [...new Set(partitions.map(({ topic }) => topic))];
  const topics = names.map((name) => [name, partitions.filter(({ topic }) => topic === name)]);
  for (const [name, all] of topics) {
    let row = place.querySelector(`[data-topic="${CSS.escape(name)}"]`);
    if (!row) {
      row = h(
        "div.topic",
        { "data-topic": name },
        h("h3", {}, TOPICS[name] ?? name, h("code", {}, name)),
        h("ol.bars", {}),
        h("p.tile-note", {}),
      );
      place.append(row);
    }
    const bars = row.querySelector(".bars");
    while (bars.childElementCount > all.length) bars.lastChild.remove();
    while (bars.childElementCount < all.length)
      bars.append(h("li.bar-one", { tabIndex: -1 }, h("span.fill"), h("span.hidden-text")));
    all.forEach((one, index) => {
      const [age, records] = [one.lagSeconds ?? 0, Number(one.lagMessages ?? 0)];
      const bar = bars.children[index];
      const text = `Partition ${one.partition}: ${count(records)} waiting, ${seconds(age)}`;
      bar.title = text;
      bar.lastChild.textContent = text;
      bar.dataset.level = age > 30 ? "bad" : age > 5 ? "warn" : records ? "some" : "";
      bar.firstChild.style.height = `${records ? Math.min(100, 12 + 22 * Math.log10(1 + records)) : 4}%`;
    });
    const records = all.reduce((sum, one) => sum + Number(one.lagMessages ?? 0), 0);
    const oldest = Math.max(0, ...all.map((one) => one.lagSeconds ?? 0));
    row.querySelector(".tile-note").textContent = records
      ? `${count(records)} waiting, ${seconds(oldest)}`
      : "nothing waits";
  }
}

function workerTable(body) {
  const names = ["Worker", "Events", "Deliveries", "Tried again", "Drained"];
  return h(
    "section.sheet",
    { ariaLabel: "Worker" },
    h("h2", {}, "Worker, since its start"),
    h(
      "div.scroll",
      { tabIndex: 0, role: "region", ariaLabel: "Workers" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            names.map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        body,
      ),
    ),
  );
}

function drawWorkers({ workers, body }) {
  const rows = [...workers.values()].map(({ worker }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, worker.name),
      [worker.events, worker.deliveries, worker.retries, worker.drainedBuckets].map((one) =>
        h("td", {}, count(Number(one ?? 0))),
      ),
    ),
  );
  body.replaceChildren(...rows);
}

function policyForm() {
  const threshold = h("input", { id: "threshold", type: "number", min: 2, max: 1e9, required: true });
  const least = h("input", { id: "least", type: "number", min: 0, max: 1e9, required: true });
  const error = h("p.error", { role: "alert" });
  let touched = false;
  const form = h(
    "form.policy",
    { oninput: () => (touched = true) },
    h("label", { htmlFor: "threshold" }, "Pull authors from so many followers"),
    threshold,
    h("label", { htmlFor: "least" }, `Under lag, not below (0: ${exactly(DEFAULT_LEAST)})`),
    least,
    error,
    h("button.primary", { type: "submit" }, icon("edit"), "Set"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    error.textContent = "";
    const text = `Authors with ${exactly(threshold.value)} followers or more are pulled within seconds.`;
    if (!(await confirmed("Set the policy?", text, "Set"))) return;
    try {
      const body = { pullThreshold: threshold.value, pullThresholdMin: least.value };
      await call("PATCH", "/fanout/policy", { body });
      touched = false;
      toast("The policy is set.");
    } catch (problem) {
      error.textContent = problem.message;
    }
  });
  const show = (policy) => {
    if (touched || form.contains(document.activeElement)) return;
    threshold.value = policy.pullThreshold;
    least.value = policy.pullThresholdMin ?? 0;
  };
  return { element: h("section.sheet", { ariaLabel: "Policy" }, h("h2", {}, "Policy"), form), show };
}

if (session.token) start();
else signIn();
