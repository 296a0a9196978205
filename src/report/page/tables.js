"use strict";
// Tables that can be sorted, bars with a legend, and controls.

/** A number with a bar behind it that is `share` of the cell long. */
function barCell(text, share) {
  const width = isNumber(share) ? Math.max(0, Math.min(1, share)) * 100 : 0;
  return el(
    "span", {class: "bar-cell"}, el("span", {class: "bar", style: `width:${width.toFixed(2)}%`}), el("span", {}, text));
}

function compareValues(left, right, descending) {
  const missing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (missing(left) || missing(right)) {
    return Number(missing(left)) - Number(missing(right));  // last in either direction
  }
  const order = typeof left === "string" ? left.localeCompare(right, "en", {numeric: true}) : left - right;
  return descending ? -order : order;
}

/**
 * A table whose headers sort it. A column is {title, help, text: true for words, style, value(row), cell(row)}: `value`
 * is what it is sorted by, `cell` a text or node, by default the value. Rows are `first` many until the user asks for
 * all.
 */
class SortedTable {
  constructor({caption, columns, sortBy = null, descending = true, first = 25, empty = "Nothing matches."}) {
    Object.assign(this, {columns, sortBy, descending, first, empty, rows: [], all: false});
    this.body = el("tbody");
    this.headers = columns.map((column, index) => this.header(column, index));
    this.more = el("button", {type: "button", class: "more", click: () => this.showAll()});
    const table = el(
      "table", {}, el("caption", {class: "hidden"}, caption), el("thead", {}, el("tr", {}, this.headers)), this.body);
    this.node = el(
      "div", {class: "table"}, el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, table),
      this.more);
  }

  header(column, index) {
    const button = el(
      "button", {type: "button", title: column.help, click: () => this.sort(index)}, column.title,
      el("span", {class: "arrow", "aria-hidden": "true"}));
    return el("th", {scope: "col", class: column.text ? "text" : "figure", "aria-sort": "none"}, button);
  }

  /** Sorts by a column: numbers with the largest first, words from A; a second time the other way round. */
  sort(index) {
    this.descending = this.sortBy === index ? !this.descending : !this.columns[index].text;
    this.sortBy = index;
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
    return this;
  }

  showAll() {
    this.all = true;
    this.draw();
  }

  sorted() {
    if (this.sortBy === null) {
      return this.rows;
    }
    const {value} = this.columns[this.sortBy];
    return [...this.rows].sort((left, right) => compareValues(value(left), value(right), this.descending));
  }

  draw() {
    this.headers.forEach((header, index) => {
      const sorted = index === this.sortBy;
      header.setAttribute("aria-sort", !sorted ? "none" : this.descending ? "descending" : "ascending");
      header.querySelector(".arrow").textContent = !sorted ? "" : this.descending ? "▼" : "▲";
    });
    const visible = this.all ? this.sorted() : this.sorted().slice(0, this.first);
    this.body.replaceChildren(...visible.map((row) => this.row(row)));
    if (this.rows.length === 0) {
      this.body.append(el("tr", {}, el("td", {class: "text muted", colspan: this.columns.length}, this.empty)));
    }
    this.more.hidden = visible.length === this.rows.length;
    this.more.textContent = `Show all ${count(this.rows.length)} rows`;
  }

  row(row) {
    return el("tr", {}, this.columns.map((column, index) => {
      const content = column.cell ? column.cell(row) : column.value(row) ?? kNone;
      const kind = `${column.text ? "text" : "figure"} ${column.style ?? ""}`.trim();
      return index === 0 ? el("th", {scope: "row", class: kind}, content) : el("td", {class: kind}, content);
    }));
  }
}

/** A drop-down list; `options` are [value, text]. */
function choice(label, options, chosen, changed) {
  const list = el(
    "select", {change: () => changed(list.value)},
    options.map(([value, text]) => el("option", {value, selected: value === chosen}, text)));
  return el("label", {class: "control"}, el("span", {}, label), list);
}

function filterBox(label, changed) {
  const input = el("input", {
    type: "search",
    placeholder: label,
    "aria-label": label,
    autocomplete: "off",
    spellcheck: "false",
    input: () => changed(input.value.trim().toLowerCase())
  });
  return input;
}

/** Buttons of which one is pressed; `options` are [value, text]. */
function segments(label, options, chosen, changed) {
  const buttons = options.map(
    ([value, text]) => el(
      "button",
      {type: "button", "aria-pressed": String(value === chosen), "data-value": value, click: () => choose(value)},
      text));
  const choose = (value) => {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === value)));
    changed(value);
  };
  return el("div", {class: "segments", role: "group", "aria-label": label}, buttons);
}

/**
 * Parts of a whole as one bar, with a legend of their values. `whole` is the length of the axis.
 */
function stackedBar({label, parts, whole, format}) {
  const sum = parts.reduce((total, part) => total + part.value, 0);
  const bar = figure((width) => {
    const x = axis(0, whole || 1, 1, width - 1);
    let start = 0;
    const boxes = parts.map((part, index) => {
      const [from, to] = [x(start), x(start += part.value)];
      return svg(
        "g", {}, svg("title", {}, `${part.name}: ${format(part.value)}`),
        svg("rect", {class: `part-${index}`, x: from, y: 1, width: Math.max(0, to - from - 1), height: 30}),
        to - from > 24 ?
          [
            svg("circle", {class: "part-ground", cx: (from + to) / 2, cy: 16, r: 9}),
            text((from + to) / 2, 20, String(index + 1), {"text-anchor": "middle"})
          ] :
          null);
    });
    const description = `${label}: ${parts.map((part) => `${part.name} ${format(part.value)}`).join(", ")}`;
    return canvas(description, width, 32, boxes);
  });
  const entries = parts.map((part, index) => el(
    "tr", {},
    el("th", {scope: "row", class: "text"}, el("span", {class: `key part-${index}`}), `${index + 1}  `, part.name),
    el("td", {class: "figure"}, format(part.value)),
    el("td", {class: "figure muted"}, percent(sum > 0 ? part.value / sum : null))));
  return el(
    "div", {}, bar.node,
    el("table", {class: "legend"}, el("caption", {class: "hidden"}, label), el("tbody", {}, entries)));
}

/** A range of whole numbers from 0 to `most`. `changed` gets null for its initial state, to which a button returns. */
function slider(label, {most, initial, show}, changed) {
  const words = el("output", {}, show(null));
  const input = el(
    "input",
    {type: "range", min: 0, max: most, value: initial, "aria-label": label, input: () => set(Number(input.value))});
  const reset = el("button", {type: "button", class: "reset", hidden: true, click: () => set(null)}, "Reset");
  const set = (value) => {
    input.value = value ?? initial;
    words.textContent = show(value);
    reset.hidden = value === null;
    changed(value);
  };
  return el("div", {class: "control slider"}, el("span", {}, label), input, words, reset);
}

function checkBox(label, changed) {
  const box = el("input", {type: "checkbox", change: () => changed(box.checked)});
  return el("label", {class: "control"}, box, el("span", {}, label));
}
