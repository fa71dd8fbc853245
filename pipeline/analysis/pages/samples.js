"use strict";
// Hides, orders and marks what the page holds anyway. It reads and writes no markup.

const element = (id) => document.getElementById(id);
const groups = Array.from(document.querySelectorAll(".group"), (group) => ({
  group,
  texts: Array.from(group.querySelectorAll(".text"), (text) => ({
    text,
    sample: text.closest(".sample"),
    content: text.textContent.toLowerCase(),
  })),
}));

function show() {
  const step = element("step").value, order = element("order").value, wanted = element("search").value.toLowerCase();
  const found = [];
  let shown = 0;
  for (const { group, texts } of groups) {
    const holding = wanted ? texts.filter(({ content }) => content.includes(wanted)) : [];
    for (const { text, sample } of texts) sample?.classList.toggle("found", holding.some((one) => one.text === text));
    group.hidden = (step !== "" && group.dataset.step !== step) || (wanted !== "" && holding.length === 0);
    shown += group.hidden ? 0 : 1;
    if (!group.hidden) found.push(...holding);
  }
  const ordered = order ? [...groups].sort((a, b) => b.group.dataset[order] - a.group.dataset[order]) : groups;
  element("groups").append(...ordered.map(({ group }) => group));
  highlight(found, wanted);
  const hold = found.length === 1 ? "text holds" : "texts hold";
  const texts = wanted ? `, ${found.length} ${hold} “${element("search").value}”` : "";
  element("told").textContent = `${shown} of ${groups.length} groups${texts}`;
}

// Marks what was searched for, where the browser can mark text without changing it.
function highlight(found, wanted) {
  if (!window.Highlight) return;
  const ranges = found.flatMap(({ text, content }) => {
    const nodes = [], walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
    for (let start = 0; walker.nextNode(); start += walker.currentNode.length) {
      nodes.push({ node: walker.currentNode, start });
    }
    const places = [];
    for (let at = content.indexOf(wanted); at >= 0; at = content.indexOf(wanted, at + wanted.length)) {
      const range = document.createRange();
      const first = nodes.findLast(({ start }) => start <= at);
      const last = nodes.findLast(({ start }) => start < at + wanted.length);
      const within = (one, offset) => Math.min(offset - one.start, one.node.length);
      range.setStart(first.node, within(first, at));
      range.setEnd(last.node, within(last, at + wanted.length));
      places.push(range);
    }
    return places;
  });
  CSS.highlights.set("search", new Highlight(...ranges));
}

element("controls").hidden = false;
for (const id of ["step", "order", "search"]) element(id).addEventListener("input", show);
show();
