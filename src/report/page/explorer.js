"use strict";
// The part of the page about values: a heat map of all tensors, the histogram of one, and a table of their shares, for
// the weights and gradients of parameters and the outputs of layers.

const kFates = {
  normal: "full precision",
  subnormal: "subnormal: fewer bits",
  zero: "rounds to zero",
  overflow: "overflows to inf"
};
const kRoundedShares = 1e-12;  // of shares in fp64; a tensor has fewer values
const kKinds = {
  gradient: {title: "Gradients", of: "parameters", axis: "size of a gradient", shares: "shares", scaled: true},
  weight: {title: "Weights", of: "parameters", axis: "size of a weight", shares: null, scaled: false},
  output: {title: "Outputs", of: "layers", axis: "size of an output", shares: "output_shares", scaled: false},
  output_gradient:
    {title: "Gradients of outputs", of: "layers", axis: "size of a gradient", shares: "shares", scaled: true},
};

class Explorer {
  constructor(runs) {
    const {report} = runs[0];
    const format = report.formats.find(({name}) => name === report.run.dtype) ?? report.formats[0];
    Object.assign(this, {
      runs,
      formats: report.formats,
      format,
      kind: "gradient",
      name: null,
      filter: "",
      exponent: null,
      logarithmic: false
    });
    this.heats = runs.map((run) => figure((width) => this.drawHeat(run, width), "heat-map"));
    this.list = el("ul", {class: "names", "aria-label": "Tensors"});
    this.title = el("h3", {class: "chosen-name", "aria-live": "polite"});
    this.histograms = runs.map((run) => this.histogramOf(run));
    this.table = new SortedTable({caption: "Shares of values", columns: this.columns(), sortBy: null, first: 12});
    this.node = this.build();
    this.choose(null);
  }

  build() {
    const kinds =
      Object.entries(kKinds).filter(([kind]) => this.all(kind).length > 0).map(([kind, {title}]) => [kind, title]);
    this.kind = kinds[0]?.[0] ?? "gradient";
    this.kinds = segments("Values of", kinds, this.kind, (kind) => this.show(kind));
    const levels = Array.from({length: kHeatLevels}, (_, level) => el("span", {class: `swatch heat-${level}`}));
    return section(
      "values", "Sizes of values",
      "Each bar counts the values of one size. A format keeps those between its limits: smaller " +
        "ones become zero, larger ones inf. The loss scale multiplies gradients, so it moves the limits.",
      el("div", {class: "controls"}, this.kinds, this.formatChoice(), this.lossScaleSlider(), this.logarithmicBox()),
      el(
        "div", {class: "explorer"},
        el("div", {class: "chooser"}, filterBox("Filter names", (words) => this.search(words)), this.list),
        el("div", {class: "shown"}, this.title, this.pair(this.histograms))),
      el("h3", {}, "All tensors"),
      el(
        "p", {class: "key-line"}, "share of a tensor’s values of one size:", el("span", {}, `under 0.1${kSpace}%`),
        levels, el("span", {}, `over 25${kSpace}%`)),
      el("div", {class: "heat-scroll", tabindex: 0, role: "region", "aria-label": "Heat map"}, this.pair(this.heats)),
      this.table.node);
  }

  formatChoice() {
    return choice("Format", this.formats.map(({name}) => [name, name]), this.format.name, (name) => {
      this.format = this.formats.find((format) => format.name === name);
      this.refresh();
    });
  }

  /** Tries another loss scale; until it is moved, and after a reset, the scale of the training is in force. */
  lossScaleSlider() {
    const show = (exponent) => exponent === null ? "as trained" : powerOfTwo(exponent);
    this.sliderNode = slider("Try loss scale", {most: 32, initial: this.trainedExponent(), show}, (exponent) => {
      this.exponent = exponent;
      this.refresh();
    });
    return this.sliderNode;
  }

  logarithmicBox() {
    return checkBox("Logarithmic shares", (checked) => {
      this.logarithmic = checked;
      this.refresh();
    });
  }

  trainedExponent() {
    const {loss_scale: changes, parameters} = this.runs[0].report;
    const last = changes.at(-1)?.[1] ?? parameters.find(({gradient}) => gradient)?.gradient.loss_scale;
    return last > 0 ? Math.round(Math.log2(last)) : 0;
  }

  /** log₂ of the factor that values had in the training when a format held them: of the loss scale, for gradients. */
  trainedShift(report, histogram) {
    if (!kKinds[this.kind].scaled) {
      return 0;
    }
    const lossScale = histogram.loss_scale ?? scaleInForce(report, histogram.step);
    return lossScale > 0 ? Math.round(Math.log2(lossScale)) : 0;  // as the shares
  }

  /** The same for the loss scale that is tried. */
  shift(report, histogram) {
    return kKinds[this.kind].scaled && this.exponent !== null ? this.exponent : this.trainedShift(report, histogram);
  }

  /** The tensors of a kind, as {name, owner, histogram, report, label}: the first run's, then those that it lacks. */
  all(kind = this.kind, runs = this.runs) {
    const found = new Map();
    for (const {report, label} of runs) {
      for (const owner of report[kKinds[kind].of]) {
        if (owner[kind] && !found.has(owner.name)) {
          found.set(owner.name, {name: owner.name, owner, histogram: owner[kind], report, label});
        }
      }
    }
    return [...found.values()];
  }

  of(run) {
    return this.all(this.kind, [run]);
  }

  /**
   * The exact shares of the report, or by exponent for another loss scale and for tensors without shares. None for a
   * gradient of a training with several loss scales: which one it had is not recorded.
   */
  shares({owner, histogram, report}) {
    const {shares, scaled} = kKinds[this.kind];
    if (!shares || (scaled && this.exponent !== null)) {
      return fates(histogram, this.format, this.shift(report, histogram));
    }
    const exact = owner[shares]?.[this.format.name];
    if (!exact) {
      return {};
    }
    const rest = 1 - exact.zero - exact.subnormal - exact.overflow;
    return {...exact, normal: histogram.counts.length > 0 && rest > kRoundedShares ? rest : 0};
  }

  lost(entry) {
    const {zero, overflow} = this.shares(entry);
    return isNumber(zero) ? zero + overflow : null;
  }

  view(entries) {
    const half = this.formats.find(({name}) => name === "float16") ?? this.format;
    // The axis stays where it is when another loss scale is tried.
    const trained = entries.map(({report, histogram}) => this.trainedShift(report, histogram));
    return {
      format: this.format,
      formats: this.formats,
      logarithmic: this.logarithmic,
      domain: exponentDomain(entries.map(({histogram}) => histogram), half, trained)
    };
  }

  everything() {
    return this.runs.flatMap((run) => this.of(run));
  }

  histogramOf(run) {
    const legend = el("ul", {class: "fates"});
    const plot = figure((width) => {
      const entry = this.of(run).find(({name}) => name === this.name);
      legend.replaceChildren(...entry ? this.fateItems(entry) : []);
      if (!entry) {
        return el("p", {class: "message"}, "Not recorded in this run.");
      }
      const same = this.everything().filter(({name}) => name === this.name);
      const highest = Math.max(...same.map(
        ({histogram}) => Math.max(0, ...histogram.counts) / (histogram.counts.reduce((a, b) => a + b, 0) || 1)));
      const shift = this.shift(run.report, entry.histogram);
      const axis = `${kKinds[this.kind].axis}${shift !== 0 ? `; limits for loss scale ${scaleText(2 ** shift)}` : ""}`;
      return histogramChart(
        entry.histogram, {...this.view(this.everything()), shift, highest: highest * 1.08 || 1, axis}, width,
        `${kKinds[this.kind].title} of ${this.name}: sizes of values, with the limits of ${this.format.name}`);
    }, "histogram");
    const heading = this.runs.length > 1 ? el("h4", {title: run.label}, shorten(run.label, 40)) : null;
    return {node: el("div", {}, heading, legend, plot.node), redraw: plot.redraw};
  }

  fateItems(entry) {
    const shares = this.shares(entry);
    const {zeros, nans, infs, numel} = entry.histogram;
    const item = (key, share, words) =>
      el("li", {}, key && el("span", {class: `swatch ${key}`}), el("b", {}, share), ` ${words}`);
    return [
      ...Object.entries(kFates).map(([key, words]) => item(key, percent(shares[key]), words)),
      item(null, percent(numel > 0 ? zeros / numel : null), "exact zeros"),
      nans + infs > 0 ? item("zero", count(nans + infs), "inf or NaN") : null,
      isNumber(shares.normal) ? null : item(null, kNone, "several loss scales: try one of them")
    ].filter(Boolean);
  }

  columns() {
    const alarming = (value) => value > 0 ? el("b", {class: "alarming"}, count(value)) : count(value);
    const share = (title, key, help) => ({
      title,
      help,
      value: (row) => this.shares(row)[key],
      cell: (row) => barCell(percent(this.shares(row)[key]), this.shares(row)[key])
    });
    const held = (key) => (row) => row.histogram[key];
    return [
      {title: "Name", text: true, value: (row) => row.name, cell: (row) => this.nameButton(row)},
      ...this.runs.length > 1 ?
        [{title: "Run", text: true, value: (row) => row.label, cell: (row) => nameNode(row.label, 16)}] :
        [],
      {title: "Layer", text: true, value: (row) => row.owner.layer_type || null},
      {title: "dtype", text: true, help: "of the tensor that was looked at", value: (row) => row.histogram.dtype},
      {title: "Values", help: "over all samples", value: held("numel"), cell: (row) => count(row.histogram.numel)},
      share("To zero", "zero", "non-zero values that round to zero in the chosen format"),
      share("Subnormal", "subnormal", "values that the chosen format keeps with fewer bits"),
      share("Overflow", "overflow", "values that are inf, or become inf in the chosen format"), {
        title: "Exact zeros",
        value: (row) => row.histogram.zeros / row.histogram.numel,
        cell: (row) => percent(row.histogram.zeros / row.histogram.numel)
      },
      {title: "NaN", value: held("nans"), cell: (row) => alarming(row.histogram.nans)},
      {title: "Inf", value: held("infs"), cell: (row) => alarming(row.histogram.infs)}, {
        title: "Largest",
        help: "largest absolute value",
        value: held("max_abs"),
        cell: (row) => number(row.histogram.max_abs)
      }
    ];
  }

  nameButton({name}) {
    return el(
      "button", {type: "button", class: "link", title: name, click: () => this.choose(name)}, shorten(name, 34));
  }

  pair(charts) {
    return el("div", {class: this.runs.length > 1 ? "pair" : ""}, charts.map(({node}) => node));
  }

  drawHeat(run, width) {
    const entries = this.of(run);
    const shift = entries.length > 0 ? this.shift(entries[0].report, entries[0].histogram) : 0;
    return heatMap(entries, {...this.view(this.everything()), shift}, width, this.name, (name) => this.choose(name));
  }

  /** Shows this tensor, or, if there is none of this name, the one of which the format loses most. */
  choose(name) {
    const entries = this.all();
    const worst =
      entries.reduce((found, entry) => !found || this.lost(entry) > this.lost(found) ? entry : found, null);
    this.name = entries.some((entry) => entry.name === name) ? name : worst?.name ?? null;
    this.refresh();
  }

  /** A function that shows the parameter or layer of this name, and scrolls to it; null if there is none. */
  opener(name) {
    const order = ["gradient", "output_gradient", "output", "weight"];
    const kind = order.find((one) => this.all(one).some((entry) => entry.name === name));
    return kind === undefined ? null : () => {
      this.kinds.querySelector(`[data-value=${kind}]`).click();
      this.choose(name);
      this.node.scrollIntoView();
    };
  }

  show(kind) {
    this.kind = kind;
    this.sliderNode.hidden = !kKinds[kind].scaled;
    this.choose(this.name);
  }

  search(words) {
    this.filter = words;
    this.refresh();
  }

  refresh() {
    const visible = this.all().filter(({name}) => name.toLowerCase().includes(this.filter));
    this.list.replaceChildren(...visible.map(
      (entry) => el(
        "li", {},
        el(
          "button", {
            type: "button",
            title: entry.name,
            "aria-pressed": String(entry.name === this.name),
            click: () => this.choose(entry.name)
          },
          el("span", {}, shorten(entry.name, 31)), el("span", {class: "muted"}, percent(this.lost(entry)))))));
    this.title.textContent = this.name ?? "No tensor was recorded";
    this.histograms.forEach((one) => one.redraw());
    this.heats.forEach((one) => one.redraw());
    this.table.show(this.everything().filter(({name}) => name.toLowerCase().includes(this.filter)));
  }
}
