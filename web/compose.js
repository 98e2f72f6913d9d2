// Writing: the composer with its weighted counter and kept draft, and the post that is shown before it is sent.

import { call, Problem, say, session, uuid } from "./api.js";
import { avatar, dialog, h, svg, toast } from "./dom.js";
import { MAX, weigh } from "./text.js";

const DRAFT = "starling.draft.";
const UNSENT = "starling.unsent.";
const UNSENT_MAX = 20;
const NEAR = 20;
const CHARS_MAX = 25_000;

/** What was begun and not sent; by user and by what it answers. */
function draft(key) {
  const name = `${DRAFT}${session.me.userId}.${key}`;
  return {
    read: () => localStorage.getItem(name) ?? "",
    keep: (text) => (text ? localStorage.setItem(name, text) : localStorage.removeItem(name)),
  };
}

/**
 * A form for a text. `submit(text)` may raise Problem: the text stays, with what was wrong. `key`: where the draft is
 * kept; null: nowhere.
 */
export function composer({ key, label, placeholder, button, text = "", submit, below = null }) {
  const kept = key ? draft(key) : { read: () => "", keep() {} };
  const area = h("textarea", {
    ariaLabel: label,
    placeholder,
    rows: 1,
    maxLength: CHARS_MAX,
    "aria-describedby": "composer-error",
    value: kept.read() || text,
  });
  const error = h("p.error", { id: "composer-error", role: "alert" });
  const meter = counter();
  const send = h("button.primary", { type: "submit" }, button);
  const form = h(
    "form.composer",
    { ariaLabel: label },
    h("div.composer-row", {}, avatar(session.me), h("div.grow", {}, area, below, error)),
    h("div.composer-foot", {}, h("span.hint", {}, "Ctrl + Enter sends"), meter.element, send),
  );
  const look = () => {
    const weight = weigh(area.value);
    meter.show(weight);
    send.disabled = !area.value.trim() || weight > MAX;
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  };
  area.addEventListener("input", () => {
    kept.keep(area.value);
    error.textContent = "";
    look();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (send.disabled) return;
    send.disabled = true;
    const written = area.value;
    try {
      await submit(written);
      if (area.value === written) area.value = "";
      kept.keep(area.value);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      error.textContent = problem.message;
    }
    look();
  });
  requestAnimationFrame(look);
  return form;
}

function counter() {
  const ring = svg("circle", { class: "ring", cx: 12, cy: 12, r: 9, pathLength: 100 });
  const left = h("span.left", { ariaHidden: "true" });
  const spoken = h("span.hidden-text", { role: "status" });
  const back = svg("circle", { class: "ring-back", cx: 12, cy: 12, r: 9 });
  const drawn = svg("svg", { viewBox: "0 0 24 24", width: 28, height: 28, "aria-hidden": "true" }, back, ring);
  const element = h("span.counter", {}, drawn, left, spoken);
  const show = (weight) => {
    const rest = MAX - weight;
    ring.style.strokeDashoffset = String(100 - Math.min(100, (weight / MAX) * 100));
    element.classList.toggle("near", rest <= NEAR && rest >= 0);
    element.classList.toggle("over", rest < 0);
    element.dataset.weight = String(weight);
    left.textContent = rest <= NEAR ? String(rest) : "";
    spoken.textContent = rest <= NEAR ? (rest < 0 ? `${-rest} too many` : `${rest} left`) : "";
  };
  return { element, show };
}

/**
 * Posts, and shows it meanwhile: says "sending", then "sent" with the tweet, or "unsent". What fails for now can be sent
 * again, with the same key, so it is never there twice; what is refused raises Problem.
 */
export async function post({ text, inReplyTo = null, quoted = null }) {
  const sending = { key: uuid(), text: text.normalize("NFC"), inReplyTo, quoted };
  keep([...unsent(), sending].slice(-UNSENT_MAX));
  say("sending", sending);
  await send(sending);
}

// What isn't sent yet outlives the page.

function unsent() {
  return JSON.parse(localStorage.getItem(UNSENT + session.me.userId) ?? "[]");
}

function keep(all) {
  localStorage.setItem(UNSENT + session.me.userId, JSON.stringify(all));
}

/** Sent, refused or discarded. */
export function forget({ key }) {
  keep(unsent().filter((sending) => sending.key !== key));
}

/** Shows what an earlier page has left, to be sent again or discarded. */
export function showUnsent() {
  for (const sending of unsent()) {
    say("sending", sending);
    say("unsent", { sending, later: true, message: "the page was left before it was done." });
  }
}

export async function send(sending) {
  const body = {
    text: sending.text,
    ...(sending.inReplyTo && { inReplyToTweetId: sending.inReplyTo.tweet.tweetId }),
    ...(sending.quoted && { quotedTweetId: sending.quoted.tweet.tweetId }),
  };
  try {
    const tweet = await call("POST", "/tweets", { body, headers: { "idempotency-key": sending.key } });
    forget(sending);
    say("sent", {
      sending,
      item: { itemId: tweet.tweetId, tweet, author: session.me, references: references(sending) },
    });
  } catch (error) {
    const later = error instanceof Problem && (error.passing || error.status === 401);
    if (!later) forget(sending);
    say("unsent", { sending, later, message: error.message });
    if (!later) throw error;
  }
}

function references({ inReplyTo, quoted }) {
  return [inReplyTo, quoted].filter(Boolean).map(({ tweet, author }) => ({ tweetId: tweet.tweetId, tweet, author }));
}

/** The composer in a dialog: a new tweet, an answer, or a quote. */
export function compose({ inReplyTo = null, quoted = null } = {}) {
  const about = inReplyTo ?? quoted;
  const title = inReplyTo ? `Reply to @${inReplyTo.author.handle}` : quoted ? "Quote" : "New tweet";
  const key = inReplyTo ? `reply.${inReplyTo.tweet.tweetId}` : quoted ? `quote.${quoted.tweet.tweetId}` : "new";
  return dialog(title, (close) => {
    const submit = async (text) => {
      const posted = post({ text, inReplyTo, quoted });
      await posted;
      close(true);
      toast(navigator.onLine ? "Your tweet was sent." : "You are offline: your tweet waits in your home.");
    };
    const preview = about && h("blockquote.about", {}, h("strong", {}, `@${about.author.handle} `), about.tweet.text);
    const form = composer({
      key,
      label: title,
      placeholder: inReplyTo ? "Your reply" : quoted ? "What do you say to it?" : "What is going on?",
      button: inReplyTo ? "Reply" : "Tweet",
      submit,
      below: quoted && preview,
    });
    return inReplyTo ? [preview, form] : form;
  });
}
