"use strict";
// The top of the page: the run, and what the report says of it, the worst first.

const kSeverities = {
  problem: ["Problem", "M5 1h6l4 4v6l-4 4H5l-4-4V5zM8 4.2v4.6M8 10.8v1.4"],
  warning: ["Warning", "M8 1.6L15 14.4H1zM8 6v4M8 11.4v1.2"],
  advice: ["Advice", "M8 1a7 7 0 1 1 0 14a7 7 0 0 1 0-14M8 7.2v4.6M8 4.2v1.4"],
  good: ["Good", "M8 1a7 7 0 1 1 0 14a7 7 0 0 1 0-14M4.6 8.2l2.4 2.4l4.4-4.8"],
};
const kOutcomes = {
  finished: "good",
  running: "advice",
  stopped: "warning",
  failed: "problem"
};
const kFirstVerdicts = 6;

function icon(severity) {
  return svg(
    "svg", {class: "icon", viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true"},
    svg("path", {d: (kSeverities[severity] ?? kSeverities.advice)[1]}));
}

function facts(run) {
  const dates = run.started ? `${run.started.slice(0, 16).replace("T", " ")} UTC` : null;
  return [
    run.opt_level && `level ${run.opt_level}`, run.dtype, run.float8 && "float8 products", run.device, plural(run.steps, "step"),
    plural(run.samples, "sample"), run.world_size > 1 && `rank ${run.rank} of ${run.world_size}`,
    run.threads && plural(run.threads, "thread"), run.starts > 1 && `${count(run.starts)} starts`,
    dates && `started ${dates}`
  ].filter(Boolean);
}

function head(runs) {
  return el(
    "header", {}, el("p", {class: "brand"}, "Semitone ", el("span", {}, "precision report")),
    el(
      "div", {class: runs.length > 1 ? "pair" : ""},
      runs.map(
        ({report: {run}}) => el(
          "div", {class: "run"},
          el(
            "h1", {title: run.directory}, el("span", {}, shorten(run.directory, 60)),
            el(
              "span", {class: `badge ${kOutcomes[run.outcome] ?? "advice"}`}, icon(kOutcomes[run.outcome]),
              run.outcome)),
          el("p", {class: "facts"}, facts(run).map((fact) => el("span", {}, fact))),
          run.reason && el("p", {class: "reason"}, run.reason)))));
}

function figureText(verdict) {
  const units = {
    "%": () => percentTick(verdict.figure / 100),
    bytes: () => bytes(verdict.figure),
    s: () => seconds(verdict.figure)
  };
  const whole = Number.isInteger(verdict.figure) ? count : number;
  return units[verdict.unit] ? units[verdict.unit]() :
                               [whole(verdict.figure), verdict.unit && el("small", {}, ` ${verdict.unit}`)];
}

/** `opener(name)` is a function that shows what a name stands for, or null. */
function card(verdict, opener) {
  const [severity] = kSeverities[verdict.severity] ?? [verdict.severity];
  const chip = (name) => {
    const open = opener(name);
    return open ? el("button", {type: "button", class: "chip", title: name, click: open}, shorten(name, 30)) :
                  el("span", {class: "chip", title: name}, shorten(name, 30));
  };
  const more = verdict.where.length > 3 ?
    el(
      "button", {
        type: "button",
        class: "chip more-names",
        click: (event) => event.currentTarget.replaceWith(...verdict.where.slice(3).map(chip))
      },
      `and ${verdict.where.length - 3} more`) :
    null;
  return el(
    "article", {class: `card ${verdict.severity}`, "data-id": verdict.id},
    el(
      "div", {class: "card-head"}, el("span", {class: "severity"}, icon(verdict.severity), severity),
      isNumber(verdict.figure) ? el("span", {class: "large"}, figureText(verdict)) : null),
    el("h3", {}, verdict.title), verdict.detail && el("p", {class: "detail"}, verdict.detail),
    verdict.remedy && el("p", {class: "remedy"}, el("b", {}, "What to change: "), verdict.remedy),
    verdict.where.length > 0 ? el("p", {class: "places"}, verdict.where.slice(0, 3).map(chip), more) : null,
    verdict.steps.length > 0 ?
      el("p", {class: "steps"}, `Step${verdict.steps.length > 1 ? "s" : ""} ${verdict.steps.map(stepText).join(", ")}`) :
      null);
}

function verdicts({verdicts: all}, opener) {
  const cards = all.map((verdict) => card(verdict, opener));
  const hidden = cards.slice(kFirstVerdicts);
  hidden.forEach((one) => one.classList.add("later"));
  const button = el(
    "button", {
      type: "button",
      class: "more",
      hidden: hidden.length === 0,
      click: () => {
        hidden.forEach((one) => one.classList.remove("later"));
        button.hidden = true;
      }
    },
    `Show ${plural(hidden.length, "more verdict")}`);
  return [
    all.length === 0 ? el("p", {class: "message"}, "Nothing was judged: the run has recorded too little.") : null,
    el("div", {class: "cards"}, cards), button
  ];
}
