"use strict";
// Charts as SVG, drawn for the width that they have: letters keep their size on a phone and on paper.

const kFigures = new Set();
const kPrintedWidth = 680;  // of A4 and Letter between their margins, in CSS pixels

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** A box that calls `draw(width)` for its content, again for paper and when its width changes, and by `redraw()`. */
function figure(draw, className = "") {
  const box = el("div", {class: `chart ${className}`});
  let width = 0;
  const redraw = (instead = 0) => {
    if ((instead || width) > 0) {
      box.replaceChildren(draw(instead || width));
    }
  };
  const measure = () => {
    const now = Math.floor(box.clientWidth);
    if (now !== width) {
      width = now;
      redraw();
    }
  };
  new ResizeObserver(() => requestAnimationFrame(measure)).observe(box);
  const result = {node: box, redraw: () => redraw()};
  kFigures.add({print: () => redraw(kPrintedWidth), restore: () => redraw()});
  return result;
}

function canvas(label, width, height, children) {
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label}, children);
}

function axis(from, to, start, end) {
  const factor = to === from ? 0 : (end - start) / (to - from);
  return (value) => start + (value - from) * factor;
}

/** Round numbers between two limits, about `most` of them. */
function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(from / step);
  return Array.from(
    {length: Math.max(0, Math.floor(to / step + 1e-9) - first + 1)}, (_, index) => (first + index) * step);
}

/** Whole exponents between two limits, at most about `most`, at multiples of 1, 2, 4, 8, … */
function exponentTicks(from, to, most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(1, to - from) / Math.max(1, most))));
  const first = Math.ceil(from / step) * step;
  return Array.from({length: Math.max(0, Math.floor((to - first) / step) + 1)}, (_, index) => first + index * step);
}

/** 2 to a power as the content of a text: superscripts that are letters would be too small on an axis. */
function powerTick(exponent) {
  return ["2", svg("tspan", {class: "power", dy: -4}, String(exponent).replace("-", "−"))];
}

function text(x, y, content, attributes = {}) {
  return svg("text", {x, y, ...attributes}, content);
}

/** Horizontal grid lines with their labels at the left. */
function gridLines(values, y, left, right, label) {
  return values.map(
    (value) => svg(
      "g", {}, svg("path", {class: "grid", d: `M${left} ${y(value).toFixed(1)}H${right}`}),
      text(left - 8, y(value) + 4, label(value), {class: "tick", "text-anchor": "end"})));
}

function bottomLabels(values, x, y, label) {
  return values.map((value) => text(x(value), y, label(value), {class: "tick", "text-anchor": "middle"}));
}

/** Of many points, the lowest and the highest of each pixel. */
function thinned(points, x) {
  const pixels = new Map();
  for (const point of points) {
    const pixel = Math.round(x(point[0]));
    const [low, high] = pixels.get(pixel) ?? [point, point];
    pixels.set(pixel, [point[1] < low[1] ? point : low, point[1] > high[1] ? point : high]);
  }
  return [...pixels.values()].flatMap(([low, high]) => low === high ? [low] : [low, high].sort((a, b) => a[0] - b[0]));
}

/** The points between those that are not finite, as lists. */
function finiteStretches(points) {
  const stretches = [[]];
  points.forEach((point) => {
    if (isNumber(point[1])) {
      stretches.at(-1).push(point);
    } else if (stretches.at(-1).length > 0) {
      stretches.push([]);
    }
  });
  return stretches.filter((stretch) => stretch.length > 0);
}

/** A line with a gap where values are not finite. The round end of a line without length is a point. */
function line(points, x, y) {
  const visible = points.length > 2000 ? (stretch) => thinned(stretch, x) : (stretch) => stretch;
  return finiteStretches(points)
    .map((stretch) => {
      const places = visible(stretch).map(([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
      return `M${places.join("L")}${places.length === 1 ? "h0" : ""}`;
    })
    .join("");
}

/** As many significant digits as tell the labels of an axis apart, at least three. */
function digitsOf(values) {
  const size = (value) => Math.floor(Math.log10(Math.abs(value)));
  const largest = Math.max(...values.map(Math.abs));
  const digits = values.length > 1 ? size(largest) - size(values[1] - values[0]) + 1 : 3;
  return Math.min(15, Math.max(3, digits));
}

/** The loss as it is drawn: as log₁₀ if it covers more than two powers of ten. */
function lossAxis(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const logarithmic = low > 0 && high / low > 100;
  const of = (value) => isNumber(value) && logarithmic ? Math.log10(value) : value;
  const margin = (of(high) - of(low)) * 0.05 || Math.abs(of(high)) * 0.1 || 1;
  return {of, logarithmic, from: of(low) - margin, to: of(high) + margin};
}

/** What charts of several runs have in common, so that they can be compared by eye. */
function timelineDomain(reports) {
  const losses = reports.flatMap((report) => report.loss.map(([, value]) => value)).filter(isNumber);
  const exponents =
    reports.flatMap((report) => report.loss_scale.map(([, value]) => Math.log2(value))).filter(isNumber);
  const [low, high] = extremes(exponents);
  return {
    last: Math.max(1, ...reports.map((report) => report.run.steps)),
    loss: losses.length > 0 ? lossAxis(extremes(losses)) : null,
    exponents: exponents.length > 0 ? [low - 1, high + 1] : null,
  };
}

function extremes(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** The last point at or before a step. */
function lastPoint(points, step) {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    [low, high] = points[middle][0] <= step ? [middle + 1, high] : [low, middle];
  }
  return low > 0 ? points[low - 1] : null;
}

function lossPanel(report, domain, x, frame) {
  const {left, right, top, bottom} = frame;
  const y = axis(domain.loss.from, domain.loss.to, bottom, top);
  const values = domain.loss.logarithmic ? exponentTicks(domain.loss.from, domain.loss.to, 5) :
                                           ticks(domain.loss.from, domain.loss.to, 4);
  const digits = digitsOf(values);
  const label = (value) => domain.loss.logarithmic ? number(10 ** value) : number(value, digits);
  return [
    gridLines(values, y, left, right, label), text(left, top - 8, "Loss", {class: "panel"}),
    svg("path", {class: "loss", d: line(report.loss.map(([step, value]) => [step, domain.loss.of(value)]), x, y)})
  ];
}

function scalePanel(report, domain, x, frame) {
  const {left, right, top, bottom} = frame;
  const y = axis(domain.exponents[0], domain.exponents[1], bottom, top);
  const path =
    report.loss_scale.filter(([, value]) => value > 0)
      .map(
        ([step, value], index) =>
          `${index === 0 ? "M" : "H"}${x(step).toFixed(1)}${index === 0 ? " " : "V"}${y(Math.log2(value)).toFixed(1)}`);
  if (path.length === 0) {
    return text(left, top - 8, "No loss scale", {class: "panel"});
  }
  const end = `H${x(report.run.steps).toFixed(1)}`;
  return [
    gridLines(exponentTicks(...domain.exponents, 4), y, left, right, powerTick),
    text(left, top - 8, "Loss scale", {class: "panel"}), svg("path", {class: "loss-scale", d: path.join("") + end})
  ];
}

function skippedMarks(report, x, top, bottom) {
  const at = report.skipped.map(({step}) => x(step).toFixed(1));
  return [
    svg("path", {class: "skipped-line", d: at.map((place) => `M${place} ${top}V${bottom}`).join("")}),
    svg("path", {class: "skipped-mark", d: at.map((place) => `M${place} ${top + 7}l-4.5 -8h9z`).join("")})
  ];
}

/** The loss scale that a step multiplied its loss by: a change at a step is in force from the next one. */
function scaleInForce(report, step) {
  const skipped = report.skipped.find((one) => one.step === step);
  return skipped?.loss_scale ?? (lastPoint(report.loss_scale, step - 1) ?? report.loss_scale[0])?.[1] ?? null;
}

function readout(report, step) {
  const loss = lastPoint(report.loss, step);
  const lossScale = scaleInForce(report, step);
  return [
    `step ${stepText(step)}`, loss && `loss ${number(loss[1], 5)}`,
    lossScale !== null && `loss scale ${scaleText(lossScale)}`,
    report.skipped.some((skipped) => skipped.step === step) && "skipped"
  ].filter(Boolean)
    .join("  ·  ");
}

/** A line under the pointer, and what there is at its step; steps that were skipped attract it. */
function cursor(report, x, domain, frame) {
  const mark = svg("path", {class: "cursor"});
  const words = text(frame.right, frame.top - 8, "", {class: "readout", "text-anchor": "end"});
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const at = axis(box.left, box.right, frame.left, frame.right)(event.clientX);
    const near = report.skipped.find(({step}) => Math.abs(x(step) - at) < 4);
    const step = near ?
      near.step :
      Math.min(report.run.steps, Math.max(0, Math.round(axis(frame.left, frame.right, 0, domain.last)(at))));
    mark.setAttribute("d", `M${x(step)} ${frame.top}V${frame.bottom}`);
    words.textContent = readout(report, step);
  };
  const leave = () => {
    mark.setAttribute("d", "");
    words.textContent = "";
  };
  return [
    mark, words, svg("rect", {
      class: "pointer",
      x: frame.left,
      y: frame.top,
      width: frame.right - frame.left,
      height: frame.bottom - frame.top,
      pointermove: move,
      pointerleave: leave
    })
  ];
}

/** Loss above, loss scale below, on one axis of steps; skipped steps are lines with a triangle. */
function timeline(report, domain, width) {
  const [left, right] = [64, width - 26];
  const x = axis(0, domain.last, left, right);
  const loss = domain.loss ? {left, right, top: 24, bottom: 184} : null;
  const start = loss ? 222 : 24;
  const lossScale = domain.exponents ? {left, right, top: start, bottom: start + 110} : null;
  const bottom = (lossScale ?? loss).bottom;
  const frame = {left, right, top: 24, bottom};
  const label = `Loss${lossScale ? " and loss scale" : ""} over ${plural(report.run.steps, "step")}; skipped steps: ` +
    (report.skipped.slice(0, 10).map(({step}) => step).join(", ") || "none");
  return canvas(label, width, bottom + 30, [
    skippedMarks(report, x, 24, bottom), loss && lossPanel(report, domain, x, loss),
    lossScale && scalePanel(report, domain, x, lossScale),
    bottomLabels(ticks(0, domain.last, Math.min(width / 110, domain.last)), x, bottom + 20, count), cursor(report, x, domain, frame)
  ]);
}
