// Elements, dialogs and times. Text gets into the page through text nodes only: nothing that people write is ever markup.

import { ICONS } from "./icons.js";

const SVG = "http://www.w3.org/2000/svg";
const TOAST_MS = 6_000;

/** An element: `h("a.link.bold", {href, onclick, ariaLabel}, ...children)`; children are nodes or texts, null is none. */
export function h(selector, attributes = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child || child === 0));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

export function logo() {
  return h("span.logo", {}, h("img", { src: "/icon.svg", alt: "", width: 32, height: 32 }), "Starling");
}

/** A modal dialog; `fill(close)` gives its content. Resolves with what `close` was called with; Escape: undefined. */
export function dialog(title, fill) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: "dialog-title" }, title);
    const box = h("dialog", { "aria-labelledby": "dialog-title" });
    let answer;
    const close = (value) => {
      answer = value;
      box.close();
    };
    const shut = h("button.round", { type: "button", ariaLabel: "Close", onclick: () => close() }, icon("close"));
    box.append(h("div.dialog-head", {}, heading, shut), ...[fill(close)].flat());
    box.addEventListener("click", (event) => event.target === box && close());
    box.addEventListener("close", () => {
      box.remove();
      resolve(answer);
    });
    document.body.append(box);
    box.showModal();
    (box.querySelector("[autofocus], textarea, .dialog-body button") ?? shut).focus();
  });
}

/** Asks yes or no; resolves with true for yes. */
export async function confirmed(title, text, yes) {
  return (
    (await dialog(title, (close) => [
      h("p", {}, text),
      h(
        "div.dialog-foot",
        {},
        h("button.quiet", { type: "button", onclick: () => close(false) }, "Cancel"),
        h("button.danger", { type: "button", onclick: () => close(true) }, yes),
      ),
    ])) === true
  );
}

/** A choice among actions: `[{label, icon, danger, run}]`. */
export async function menu(title, actions) {
  const chosen = await dialog(title, (close) =>
    h(
      "div.menu.dialog-body",
      {},
      actions.map((action) =>
        h(
          action.danger ? "button.danger-text" : "button",
          { type: "button", onclick: () => close(action) },
          icon(action.icon),
          action.label,
        ),
      ),
    ),
  );
  await chosen?.run();
}

/** A short word at the bottom, spoken politely; one at a time. */
export function toast(text, link = null) {
  const shown = h("div.toast", {}, h("span", {}, text), link);
  document.getElementById("toasts").replaceChildren(shown);
  setTimeout(() => shown.remove(), TOAST_MS);
}

/** What screen readers hear and nobody sees. */
export function announce(text) {
  document.getElementById("news").textContent = text;
}

/** A state in the place of content: empty, error. `again`: what a button there does. */
export function state(title, text, again = null, label = "Try again") {
  return h(
    "div.state",
    { role: again ? "alert" : null },
    title && h("h2", {}, title),
    h("p", {}, text),
    again && h("button.primary", { type: "button", onclick: again }, label),
  );
}

export function skeletons(count = 4) {
  const one = () => h("div.skeleton", { ariaHidden: "true" }, h("span.avatar"), h("div", {}, h("i"), h("i"), h("i")));
  return h("div", { role: "status", ariaLabel: "Loading" }, Array.from({ length: count }, one));
}

export function avatar(user) {
  const letter = [...(user.displayName || user.handle || "?")][0].toUpperCase();
  const hue = Number(BigInt(user.userId || 0) % 1009n) % 8;
  return h(`span.avatar.hue-${hue}`, { ariaHidden: "true" }, letter);
}

/** A moment as people say it: "now", "5m", "3h", else the date; the title has all of it. */
export function moment(iso) {
  const date = new Date(iso);
  const title = date.toLocaleString("en", { dateStyle: "full", timeStyle: "short" });
  return h("time", { dateTime: iso, title }, ago(date));
}

/** Says the moments in an element again, as time goes by. */
export function freshen(element) {
  for (const time of element.querySelectorAll("time")) time.textContent = ago(new Date(time.dateTime));
}

function ago(date) {
  const minutes = Math.floor((Date.now() - date) / 60_000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes}m`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)}h`;
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString("en", { month: "short", day: "numeric", year });
}

/** 1234 → "1,234", 12345 → "12.3K". */
export function count(number) {
  return Number(number).toLocaleString("en", number < 10_000 ? {} : { notation: "compact", maximumFractionDigits: 1 });
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${Number(number) === 1 ? one : many}`;
}
