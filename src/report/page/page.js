"use strict";
// The page of a precision report: verdicts, timeline, values, operators, time and memory, updates, and the run itself.
// With a second run ("compare") each chart is drawn twice, on the same axes, and tables have rows of both runs.

function whySkipped({parameter, non_finite: parameters}) {
  if (!parameter) {
    return "A gradient was inf or NaN on another rank.";
  }
  return [
    "The gradient of ", nameNode(parameter, 44),
    parameters > 1 ? ` and ${parameters > 2 ? "those" : "that"} of ${plural(parameters - 1, "other parameter")} were` :
                     " was",
    " inf or NaN."
  ];
}

function skippedTable(report) {
  const after = ({scale_after: scale}) => scale ?? undefined;
  const columns = [
    {
      title: "Skipped step",
      value: (row) => row.step,
      cell: (row) => `${row.exact ? "" : "up to "}${stepText(row.step)}`
    },
    {title: "Why", text: true, style: "sentence", value: (row) => row.parameter, cell: whySkipped},
    {title: "Loss scale", value: (row) => row.loss_scale, cell: (row) => scaleText(row.loss_scale)},
    {title: "Changed to", value: after, cell: (row) => scaleText(after(row))}
  ];
  const table = new SortedTable({caption: "Skipped steps", columns, sortBy: 0, first: 8});
  return table.show(report.skipped).node;
}

function timelineSection(runs) {
  const domain = timelineDomain(runs.map((run) => run.report));
  const one = (report) =>
    [domain.loss || domain.exponents ?
       figure((width) => timeline(report, domain, width), "timeline").node :
       el("p", {class: "message"}, "The run has recorded neither losses nor loss scales."),
     report.skipped.length > 0 ? skippedTable(report) : null];
  return section(
    "timeline", "Loss and loss scale",
    "A triangle marks a skipped step: its gradients had inf or NaN, so it left the weights as they were.",
    sideBySide(runs, one));
}

function build(report) {
  const runs = [report, report.compare].filter(Boolean).map((one) => ({report: one, label: one.run.directory}));
  const sampled = runs.some(({report: one}) => one.run.samples > 0);
  const explorer = sampled ? new Explorer(runs) : null;
  const opener = (name) => explorer?.opener(name) ?? operatorOpener(runs, name);
  const links = [
    ["verdicts", "Verdicts"], ["timeline", "Timeline"],
    ...sampled ?
      [["values", "Values"], ["operators", "Operators"], ["costs", "Time and memory"], ["updates", "Updates"]] :
      [],
    ["run", "Run"]
  ];
  document.title = `${runs.map((run) => run.label).join(" and ")} – precision report`;
  document.getElementById("page").append(
    head(runs), el("nav", {"aria-label": "Sections"}, links.map(([id, title]) => el("a", {href: `#${id}`}, title))),
    el(
      "main", {},
      el(
        "section", {id: "verdicts", "aria-label": "Verdicts"},
        sideBySide(runs.map((run) => ({report: run.report})), (one) => verdicts(one, opener))),
      timelineSection(runs),
      ...sampled ? [explorer.node, operatorsSection(runs), costsSection(runs), updatesSection(runs)] :
                   [el(
                     "p", {class: "message"},
                     "The run has no samples of its values, operators, time and memory. report::Recorder takes them.")],
      runSection(runs)));
}

function read() {
  const report = JSON.parse(document.getElementById("report").textContent);
  if (report.format !== "semitone-report" || report.version !== 1) {
    throw new Error(`expected a semitone-report of version 1, got ${report.format} of version ${report.version}`);
  }
  return report;
}

function start() {
  try {
    build(read());
  } catch (error) {
    document.getElementById("page").replaceChildren(
      el("p", {class: "message"}, `This page cannot show its report: ${error.message}`));
    throw error;
  }
  addEventListener("beforeprint", () => kFigures.forEach((one) => one.print()));
  addEventListener("afterprint", () => kFigures.forEach((one) => one.restore()));
}

addEventListener("DOMContentLoaded", start);  // all scripts have run then, in whatever order
