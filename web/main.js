// The frame: who is signed in, which view is shown, the keyboard, and whether there is a connection.

import { events, session } from "./api.js";
import { compose } from "./compose.js";
import { dialog, h, icon, logo, skeletons, state } from "./dom.js";
import { like, more, retweetOrQuote } from "./tweet.js";
import { find, followers, following, heading, hidden, Home, profile, signIn, tweet } from "./views.js";

const app = document.getElementById("app");
const ROUTES = [
  [/^#\/@(\w{1,20})\/followers$/, followers],
  [/^#\/@(\w{1,20})\/following$/, following],
  [/^#\/@(\w{1,20})$/, profile],
  [/^#\/tweet\/(\d{1,20})$/, tweet],
  [/^#\/hidden$/, hidden],
];
const KEYS = [
  ["j / k", "next, previous tweet"],
  ["Enter", "open the tweet"],
  ["l", "like"],
  ["r", "reply"],
  ["t", "retweet or quote"],
  ["m", "more: edit, delete, follow, block …"],
  ["n", "new tweet"],
  [".", "show what is new"],
  ["/", "find somebody"],
  ["h", "home"],
  ["?", "this list"],
];

let home = null;
let view = null;
let main = null;
let homeScroll = 0;
let going = 0;

function start(message = "") {
  view?.stop?.();
  home?.stop();
  home = view = main = null;
  if (session.token && !session.me) return resume();
  document.title = "Starling";
  if (session.me) frame();
  else app.replaceChildren(signIn(message, () => start()));
}

/** A token from before this page was loaded. */
async function resume() {
  app.replaceChildren(h("main.sign-in", { id: "main" }, skeletons(3)));
  try {
    await session.signIn(session.token);
    start();
  } catch (error) {
    if (session.token)
      app.replaceChildren(h("main.sign-in", { id: "main" }, state("No connection", error.message, resume)));
    else start(error.status === 401 ? "Your session is over. Sign in again." : error.message);
  }
}

function frame() {
  const handle = session.me.handle;
  const entry = (href, image, label) => h("a", { href, "data-route": href }, icon(image), h("span.label", {}, label));
  const nav = h(
    "nav",
    { ariaLabel: "Main" },
    h("a.brand", { href: "#/", ariaLabel: "Starling, home" }, logo()),
    entry("#/", "home", "Home"),
    entry(`#/@${handle}`, "person", "Profile"),
    h("button", { type: "button", onclick: find }, icon("find"), h("span.label", {}, "Find somebody")),
    entry("#/hidden", "shield", "Hidden"),
    h("button.keys", { type: "button", onclick: help }, icon("keyboard"), h("span.label", {}, "Keyboard")),
    h("button", { type: "button", onclick: () => session.signOut() }, icon("leave"), h("span.label", {}, "Sign out")),
    h(
      "button.primary.write",
      { type: "button", onclick: () => compose() },
      icon("feather"),
      h("span.label", {}, "Tweet"),
    ),
  );
  main = h("main", { id: "main" });
  app.replaceChildren(h("div.frame", {}, nav, main));
  home = new Home();
  route(true);
}

async function route(first = false) {
  if (!session.me) return;
  const mine = ++going;
  if (view === home && home) homeScroll = scrollY;
  if (view !== home) view?.stop?.();
  const hash = location.hash || "#/";
  for (const link of document.querySelectorAll("nav [data-route]")) {
    if (link.dataset.route === hash) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [match, make] = ROUTES.map(([pattern, made]) => [pattern.exec(hash), made]).find(([found]) => found) ?? [];
  if (!match) return show(home, first);
  view = null;
  main.replaceChildren(skeletons());
  try {
    const made = await make(...match.slice(1));
    if (mine === going) show(made, first);
    else made.stop?.();
  } catch (error) {
    if (mine === going) show(failure(error), first);
  }
}

function failure(error) {
  const title = error.status === 404 ? "Not here" : error.status ? "That didn't work" : "No connection";
  const again = error.status === 404 ? null : () => route();
  return { element: h("div", {}, heading(title), state("", error.message, again)), title, again };
}

function show(next, first) {
  view = next;
  main.replaceChildren(next.element);
  scrollTo(0, next === home ? homeScroll : 0);
  next.shown?.();
  title();
  if (!first) main.querySelector("h1")?.focus({ preventScroll: true });
}

function title() {
  if (view) document.title = `${home?.news ? `(${home.news}) ` : ""}${view.title} / Starling`;
  document.querySelector('nav [data-route="#/"]')?.setAttribute("data-news", home?.news ?? "");
}

function help() {
  return dialog("Keyboard", () =>
    h(
      "dl.key-list",
      {},
      KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]),
    ),
  );
}

// The keyboard

function move(by) {
  const cards = [...main.querySelectorAll(".tweet")];
  const at = cards.indexOf(document.activeElement?.closest(".tweet"));
  const seen = cards.findIndex((element) => element.getBoundingClientRect().bottom > 120);
  const next = cards[at < 0 ? seen : Math.min(cards.length - 1, Math.max(0, at + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

const SHORTCUTS = {
  j: () => move(1),
  k: () => move(-1),
  n: () => compose(),
  ".": () => home.showNew(),
  "/": find,
  h: () => (location.hash = "#/"),
  "?": help,
};
const ON_TWEETS = { l: like, r: ({ item }) => compose({ inReplyTo: item }), t: retweetOrQuote, m: more };

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, dialog");
  if (!session.me || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const focused = document.activeElement?.closest(".tweet")?.view;
  const run = SHORTCUTS[event.key] ?? (focused?.item.itemId && ON_TWEETS[event.key]);
  if (!run) return;
  event.preventDefault();
  Promise.resolve(run(focused)).catch((error) => console.warn(error.message));
});

// What happens elsewhere

function connection() {
  const banner = document.getElementById("banner");
  banner.textContent = navigator.onLine ? "" : "You are offline. What you write is kept.";
  document.body.classList.toggle("offline", !navigator.onLine);
}

addEventListener("hashchange", () => route());
addEventListener("online", connection);
addEventListener("online", () => view?.again?.());
addEventListener("offline", connection);
events.addEventListener("signedout", ({ detail }) => start(detail));
events.addEventListener("news", title);
events.addEventListener("relation", () => {
  if (/^#\/@\w+$/.test(location.hash)) route(); // a profile shows what one is to another
});
history.scrollRestoration = "manual";
connection();
start();
