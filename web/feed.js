// The order of a timeline: strictly descending by item id, each once, whatever order things come in.

import { compareIds } from "./api.js";

export class Feed {
  constructor() {
    this.items = [];
    this.byId = new Map();
  }

  /** Takes items in, those it has left out; returns the new ones, each with `before`: the item below it, or null. */
  add(items) {
    const added = [];
    for (const item of items) {
      if (this.byId.has(item.itemId)) continue;
      const at = this.place(item.itemId);
      added.push({ item, before: this.items[at] ?? null });
      this.items.splice(at, 0, item);
      this.byId.set(item.itemId, item);
    }
    return added;
  }

  /** The index at which an id stands or would stand. */
  place(id) {
    let [low, high] = [0, this.items.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (compareIds(this.items[middle].itemId, id) > 0) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Drops what the test says; returns it. */
  remove(test) {
    const gone = this.items.filter(test);
    this.items = this.items.filter((item) => !test(item));
    for (const item of gone) this.byId.delete(item.itemId);
    return gone;
  }
}
