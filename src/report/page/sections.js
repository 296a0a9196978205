"use strict";
// The sections of the page from operators to the run itself. Charts of two runs are side by side, tables have rows of
// both.

const kPhases = {
  data: "Waiting for data",
  forward: "Forward",
  backward: "Backward",
  communication: "Waiting for other ranks",
  unscale: "Unscaling gradients",
  optimizer: "Optimizer",
  other: "Everything else"
};
const kMemory = {
  parameters: "Parameters",
  masters: "fp32 master weights",
  gradients: "Gradients",
  optimizer_state: "Optimizer state",
  activations: "Activations"
};

function section(id, title, lead, ...content) {
  return el(
    "section", {id, "aria-labelledby": `${id}-title`}, el("h2", {id: `${id}-title`}, title),
    lead && el("p", {class: "lead"}, lead), content);
}

/** What `draw` makes of each run: one below its heading, or two side by side. */
function sideBySide(runs, draw) {
  return el(
    "div", {class: runs.length > 1 ? "pair" : ""},
    runs.map(
      (run) => el(
        "div", {},
        runs.length > 1 && run.label ? el("h3", {title: run.report.run.directory}, shorten(run.label, 48)) : null,
        draw(run.report))));
}

function operatorsSection(runs) {
  const isOnGpu = runs.some(({report}) => report.run.device && report.run.device !== "cpu");
  const all = runs.flatMap(({report, label}) => report.operators.map((operator) => ({...operator, run: label})));
  const most = runs.length > 1 ? 34 : 44;
  const longest = Math.max(...all.map((row) => row.share ?? 0), 0);
  const columns = [
    {title: "Operator", text: true, value: (row) => row.name, cell: (row) => nameNode(row.name, most)},
    ...runs.length > 1 ? [{title: "Run", text: true, value: (row) => row.run, cell: (row) => nameNode(row.run, 16)}] :
                         [],
    {title: "Pass", text: true, value: (row) => row.pass},
    {title: "dtype", text: true, value: (row) => row.dtype || null}, {
      title: "Kernel",
      text: true,
      help: "native: the processor's own; emulated: computes in fp32; semitone: this library's",
      value: (row) => row.kernel
    },
    {title: "Time", value: (row) => row.seconds, cell: (row) => seconds(row.seconds)}, {
      title: "Share",
      help: "of the time of all operators",
      value: (row) => row.share,
      cell: (row) => barCell(percent(row.share), row.share / longest)
    },
    {title: "Calls", value: (row) => row.calls, cell: (row) => count(row.calls)},
    {title: "Bytes", help: "of arguments and results", value: (row) => row.bytes, cell: (row) => bytes(row.bytes)},
    {title: "Casts", help: "made for its arguments", value: (row) => row.casts, cell: (row) => count(row.casts)}, {
      title: "Cached",
      help: "casts that the cache saved",
      value: (row) => row.cached_casts,
      cell: (row) => count(row.cached_casts)
    },
    {
      title: "Cast bytes",
      help: "read and written by casts",
      value: (row) => row.cast_bytes,
      cell: (row) => bytes(row.cast_bytes)
    }
  ];
  const table =
    new SortedTable({caption: "Operators", columns, sortBy: columns.findIndex(({title}) => title === "Time")});
  const filter = {name: "", pass: "", dtype: ""};
  const apply = (key) => (value) => {
    filter[key] = value;
    table.show(all.filter(
      (row) => row.name.toLowerCase().includes(filter.name) &&
        ["pass", "dtype"].every((one) => !filter[one] || (row[one] || "none") === filter[one])));
  };
  const options =
    (key) => [["", "all"], ...[...new Set(all.map((row) => row[key] || "none"))].sort().map((value) => [value, value])];
  apply("name")("");
  return section(
    "operators", "Operators",
    "Time of each operator, without the operators that it calls, over all samples, without the first of each start if " +
      "there are others." + (isOnGpu ? " On a GPU, it is the time of the host's calls, which only queue the work." : ""),
    el(
      "div", {class: "controls"}, filterBox("Filter operators", apply("name")),
      choice("Pass", options("pass"), "", apply("pass")), choice("dtype", options("dtype"), "", apply("dtype"))),
    table.node);
}

/** A function that shows the operator of this name, and scrolls to it; null if there is none. */
function operatorOpener(runs, name) {
  if (!runs.some(({report}) => report.operators.some((operator) => operator.name === name))) {
    return null;
  }
  return () => {
    const filter = document.querySelector("#operators input");
    filter.value = name;
    filter.dispatchEvent(new Event("input"));
    document.getElementById("operators").scrollIntoView();
  };
}

function bars(title, lead, runs, names, key, format) {
  // What one run has is listed for both, so that they have the same colours and numbers.
  const used = Object.keys(names).filter((name) => runs.some(({report}) => report[key]?.[name] > 0));
  const known = (report) => used.some((name) => isNumber(report[key]?.[name]));
  const parts = (report) => used.map((name) => ({name: names[name], value: report[key]?.[name] ?? 0}));
  const sum = (report) => parts(report).reduce((total, part) => total + part.value, 0);
  const whole = Math.max(...runs.map(({report}) => sum(report)));
  return el(
    "div", {}, el("h2", {}, title), el("p", {class: "lead"}, lead),
    sideBySide(
      runs,
      (report) => known(report) ? stackedBar({label: title, parts: parts(report), whole, format}) :
                                  el("p", {class: "message"}, "Not measured.")));
}

function costsSection(runs) {
  const means = runs.map(({report}) => seconds(report.step_seconds)).join(" and ");
  return el(
    "section", {id: "costs", class: runs.length > 1 ? "" : "pair", "aria-label": "Time and memory"},
    bars(
      "Time of a step",
      `A step took ${means}, on average over the samples, without the first of each start if there are others.`, runs,
      kPhases, "phases", seconds),
    bars("Memory", "The most that a sampled step used.", runs, kMemory, "memory", bytes));
}

function updatesSection(runs) {
  const all = runs.flatMap(
    ({report, label}) => report.parameters.filter((one) => one.updates > 0 || isNumber(one.update_ratio))
                           .map((one) => ({...one, run: label})));
  const most = runs.length > 1 ? 34 : 60;
  const largest = Math.max(...all.map((row) => row.update_ratio ?? 0), 0);
  const lost = (format) => ({
    title: `Lost in ${format}`,
    help: `changes that would vanish if the weight were kept in ${format}`,
    value: (row) => row.lost?.[format],
    cell: (row) => barCell(percent(row.lost?.[format]), row.lost?.[format])
  });
  const columns = [
    {title: "Parameter", text: true, value: (row) => row.name, cell: (row) => nameNode(row.name, most)},
    ...runs.length > 1 ? [{title: "Run", text: true, value: (row) => row.run, cell: (row) => nameNode(row.run, 16)}] :
                         [],
    {
      title: "Update / weight",
      help: "norm of the update divided by the norm of the weight",
      value: (row) => row.update_ratio,
      cell: (row) => barCell(number(row.update_ratio), row.update_ratio / largest)
    },
    {title: "Changed values", value: (row) => row.updates, cell: (row) => count(row.updates)}, lost("float16"),
    lost("bfloat16")
  ];
  return section(
    "updates", "Updates of weights",
    "A lost update is one that would not change the weight if the weight were kept in 16 bits. " +
      "fp32 master weights keep it.",
    new SortedTable(
      {caption: "Updates of weights", columns, sortBy: columns.length - 2, empty: "No updates were recorded."})
      .show(all)
      .node);
}

function runSection(runs) {
  const details = ({run}) => Object
                               .entries({
                                 Directory: run.directory,
                                 Outcome: [run.outcome, run.reason].filter(Boolean).join(": "),
                                 Started: run.started,
                                 Ended: run.ended,
                                 Processor: run.processor,
                                 ...run.versions,
                                 ...run.config
                               })
                               .filter(([, value]) => value);
  return section(
    "run", "The run", null,
    sideBySide(
      runs,
      (report) => el(
        "dl", {},
        details(report).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))))));
}
