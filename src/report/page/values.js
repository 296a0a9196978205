"use strict";
// Charts of the sizes of values: histograms and a heat map on a log₂ axis, with the limits of number formats.

const kHeatLevels = 6;

/** What becomes of a value of this exponent in a format: "zero", "subnormal", "normal" or "overflow". */
function fate(exponent, format) {
  if (exponent > format.max_exponent) {
    return "overflow";
  }
  if (exponent >= format.min_normal) {
    return "normal";
  }
  return exponent >= format.min_subnormal - 1 ? "subnormal" : "zero";  // half of the smallest value rounds up to it
}

/** The shares of a histogram's values that meet each fate, after a multiplication by 2^shift. */
function fates(histogram, format, shift) {
  const counts = {zero: 0, subnormal: 0, normal: 0, overflow: histogram.infs};
  const total = histogram.counts.reduce((sum, value) => sum + value, histogram.infs);
  histogram.counts.forEach((value, index) => {
    counts[fate(Math.floor(histogram.first_exponent + index + shift), format)] += value;
  });
  return Object.fromEntries(Object.entries(counts).map(([key, value]) => [key, value / (total || 1)]));
}

/** Exponents that all of these histograms and the limits of `format` need, as [first, behind the last]. */
function exponentDomain(histograms, format, shifts) {
  const ends = histograms.filter((one) => one.counts.length > 0)
                 .flatMap((one) => [one.first_exponent, one.first_exponent + one.counts.length]);
  const limits =
    shifts.flatMap((shift) => [Math.floor(format.min_subnormal - shift), Math.ceil(format.max_exponent + 1 - shift)]);
  const [low, high] = extremes([...ends, ...limits]);
  return [low - 2, high + 2];
}

/** Lines at the limits of a format, with their names in rows above each other. */
function limitLines(format, shift, x, top, bottom, domain, names) {
  const limits =
    [[format.max_exponent + 1, "largest"], [format.min_normal, "smallest normal"], [format.min_subnormal, "smallest"]];
  return limits.map(([exponent, name], index) => {
    const at = exponent - shift;
    if (at < domain[0] || at > domain[1]) {
      return null;
    }
    const place = x(at);
    const end = place > (x(domain[0]) + x(domain[1])) / 2;
    const row = names ? top - 8 - 14 * (2 - index) : top;
    return [
      svg("path", {class: "limit", d: `M${place.toFixed(1)} ${row}V${bottom}`}),
      names &&
        text(
          place + (end ? -5 : 5), row + 9, `${name} of ${format.name}`,
          {class: "limit-name", "text-anchor": end ? "end" : "start"})
    ];
  });
}

/** The range of each format below the histogram: pale for subnormal values. */
function formatRanges(formats, chosen, shift, x, domain, top) {
  const clip = (exponent) => x(Math.max(domain[0], Math.min(domain[1], exponent - shift)));
  return formats.map((format, index) => {
    const y = top + index * 26;
    const [low, normal, high] = [clip(format.min_subnormal), clip(format.min_normal), clip(format.max_exponent + 1)];
    const wider = format.min_subnormal - shift < domain[0] && format.max_exponent + 1 - shift > domain[1];
    return svg(
      "g", {class: format.name === chosen.name ? "range chosen" : "range"},
      text(x(domain[0]), y + 10, format.name + (wider ? "  ← →" : ""), {class: "range-name"}),
      svg("rect", {class: "range-subnormal", x: low, y: y + 14, width: Math.max(0, normal - low), height: 6}),
      svg("rect", {class: "range-normal", x: normal, y: y + 14, width: Math.max(0, high - normal), height: 6}));
  });
}

function histogramBars(histogram, view, x, y, bottom) {
  const total = histogram.counts.reduce((sum, value) => sum + value, 0);
  const paths = {normal: "", subnormal: "", zero: "", overflow: ""};
  histogram.counts.forEach((value, index) => {
    const exponent = histogram.first_exponent + index;
    if (value > 0) {
      const top = Math.min(bottom - 1.5, y(value / total)).toFixed(1);  // rare values are seen, too
      const [from, to] = [(x(exponent) + 0.5).toFixed(1), (x(exponent + 1) - 0.5).toFixed(1)];
      paths[fate(Math.floor(exponent + view.shift), view.format)] += `M${from} ${bottom}V${top}H${to}V${bottom}z`;
    }
  });
  const used = Object.keys(paths).filter((name) => paths[name] !== "");
  return used.map((name) => svg("path", {class: `values ${name}`, d: paths[name]}));
}

/**
 * The sizes of a tensor's values on a log₂ axis, with the limits of the formats. `view` has the format, all formats,
 * the shift (log₂ of the loss scale: values reach the format multiplied by it), the domain, the highest share, and
 * logarithmic.
 */
function histogramChart(histogram, view, width, label) {
  const [left, right, top, bottom] = [56, width - 12, 62, 252];
  const x = axis(...view.domain, left, right);
  const floor = -5;  // of a logarithmic axis: 0.001 %
  const y = view.logarithmic ? (share) => axis(floor, 0, bottom, top)(Math.max(floor, Math.log10(share))) :
                               axis(0, view.highest, bottom, top);
  const grid = view.logarithmic ? [1e-5, 1e-3, 0.1, 1] : ticks(0, view.highest, 4);
  const formatsTop = bottom + 46;
  return canvas(label, width, formatsTop + view.formats.length * 26 + 2, [
    gridLines(grid, y, left, right, percentTick), histogramBars(histogram, view, x, y, bottom),
    svg("path", {class: "axis", d: `M${left} ${bottom}H${right}`}),
    bottomLabels(exponentTicks(...view.domain, (right - left) / 44), x, bottom + 18, powerTick),
    text(right, bottom + 36, view.axis, {class: "tick", "text-anchor": "end"}),
    limitLines(view.format, view.shift, x, top, bottom, view.domain, true),
    formatRanges(view.formats, view.format, view.shift, x, view.domain, formatsTop)
  ]);
}

/** One row a tensor, one column an exponent; the darker, the more of the tensor's values. `choose(name)` on a click. */
function heatMap(rowsOfMap, view, width, selected, choose) {
  const [left, right, height, top] = [width < 520 ? 112 : 230, width - 8, 16, 22];
  const x = axis(...view.domain, left, right);
  const paths = Array(kHeatLevels).fill("");
  rowsOfMap.forEach(({histogram}, row) => {
    const total = histogram.counts.reduce((sum, value) => sum + value, 0);
    histogram.counts.forEach((value, index) => {
      if (value > 0) {
        const level = Math.min(kHeatLevels - 1, Math.max(0, Math.floor(kHeatLevels + Math.log2(value / total) / 2)));
        const [from, to] = [x(histogram.first_exponent + index), x(histogram.first_exponent + index + 1)];
        paths[level] +=
          `M${from.toFixed(1)} ${top + row * height + 1}H${to.toFixed(1)}v${height - 2}H${from.toFixed(1)}z`;
      }
    });
  });
  const bottom = top + rowsOfMap.length * height;
  const most = Math.floor((left - 8) / 6.9);
  return canvas(`Sizes of the values of ${plural(rowsOfMap.length, "tensor")}`, width, bottom + 2, [
    bottomLabels(exponentTicks(...view.domain, (right - left) / 44), x, 13, powerTick),
    paths.map((d, level) => svg("path", {class: `heat heat-${level}`, d})),
    limitLines(view.format, view.shift, x, top, bottom, view.domain, false),
    rowsOfMap.map(
      ({name}, row) => svg(
        "g", {class: name === selected ? "heat-row selected" : "heat-row", click: () => choose(name)},
        svg("title", {}, name), svg("rect", {x: 1, y: top + row * height, width: width - 2, height}),
        text(left - 8, top + row * height + 12, shorten(name, most), {class: "tick", "text-anchor": "end"})))
  ]);
}
