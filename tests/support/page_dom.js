"use strict";
// As much of a browser's document as scripts of our pages use; anything else is a TypeError, as a misspelled name is.
// `PAGE` is the page: an element is [tag, {attribute: value}, [children]], a text is a string.

class Text {
  constructor(data) { this.data = data; }
  get length() { return this.data.length; }
  get textContent() { return this.data; }
}

class Element {
  constructor([tag, attributes, children]) {
    this.tag = tag;
    this.attributes = attributes;
    this.listeners = {};
    this.children = [];
    this.append(...children.map((child) => (typeof child === "string" ? new Text(child) : new Element(child))));
  }
  get id() { return this.attributes.id; }
  get textContent() { return this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = [new Text(text)]; }
  get hidden() { return "hidden" in this.attributes; }
  set hidden(whether) { if (whether) this.attributes.hidden = ""; else delete this.attributes.hidden; }
  get dataset() {
    const data = Object.entries(this.attributes).filter(([name]) => name.startsWith("data-"));
    return Object.fromEntries(data.map(([name, value]) => [name.slice(5), value]));
  }
  get classes() { return (this.attributes.class ?? "").split(" ").filter(Boolean); }
  get classList() {
    return {
      toggle: (name, whether) => {
        const others = this.classes.filter((one) => one !== name);
        this.attributes.class = (whether ? [...others, name] : others).join(" ");
      },
    };
  }
  get choices() {
    return this.querySelectorAll("option").map((option) => option.attributes.value ?? option.textContent);
  }
  get value() { return this.entered ?? (this.tag === "select" ? this.choices[0] : ""); }
  matches(selector) { return selector[0] === "." ? this.classes.includes(selector.slice(1)) : this.tag === selector; }
  closest(selector) { return this.matches(selector) ? this : this.parent?.closest(selector) ?? null; }
  within() { return this.children.flatMap((child) => (child instanceof Element ? [child, ...child.within()] : [])); }
  querySelectorAll(selector) { return this.within().filter((one) => one.matches(selector)); }
  append(...nodes) {
    for (const node of nodes) {
      if (node.parent) node.parent.children = node.parent.children.filter((child) => child !== node);
      node.parent = this;
      this.children.push(node);
    }
  }
  texts() { return this.children.flatMap((child) => (child instanceof Element ? child.texts() : [child])); }
  addEventListener(kind, listener) { (this.listeners[kind] ??= []).push(listener); }
}

class Range {
  setStart(node, offset) { this.start = { node, offset: within(node, offset) }; }
  setEnd(node, offset) { this.end = { node, offset: within(node, offset) }; }
}

function within(node, offset) {
  if (!(offset >= 0 && offset <= node.length)) throw new RangeError(`${offset} of ${node.length} characters`);
  return offset;
}

class Highlight {
  constructor(...ranges) { this.ranges = ranges; }
}

const NodeFilter = { SHOW_TEXT: 4 }, CSS = { highlights: new Map() }, window = { Highlight };
const root = new Element(["#document", {}, PAGE]);
const document = {
  getElementById: (id) => root.within().find((one) => one.id === id) ?? null,
  querySelectorAll: (selector) => root.querySelectorAll(selector),
  createRange: () => new Range(),
  createTreeWalker(top, what) {
    if (what !== NodeFilter.SHOW_TEXT) throw new TypeError("only texts are walked");
    const texts = top.texts();
    return { currentNode: top, nextNode() { return texts.length ? (this.currentNode = texts.shift()) : null; } };
  },
};

// What a person does, and what the person sees. The script of a page knows nothing of these.
function enter(id, value) {
  const control = document.getElementById(id);
  if (control.tag === "select" && !control.choices.includes(value)) throw new RangeError(`${id} offers no ${value}`);
  control.entered = value;
  for (const listener of control.listeners.input ?? []) listener();
}

function marked() {
  return (CSS.highlights.get("search")?.ranges ?? []).map(({ start, end }) => {
    const texts = root.texts(), first = texts.indexOf(start.node), last = texts.indexOf(end.node);
    const pieces = texts.slice(first, last + 1).map((text, place, all) => text.data.slice(
      place === 0 ? start.offset : 0, place === all.length - 1 ? end.offset : undefined));
    return pieces.join("|");
  });
}
