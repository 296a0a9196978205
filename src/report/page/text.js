"use strict";
// Nodes, and numbers as text. Data reach the page as text nodes and attributes only, so that names in a report may
// contain anything.

const kNone = "–";
const kSpace = "\u202f";  // narrow, does not break: between a number and its unit
const kSuperscripts = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      node.addEventListener(name, value);
    } else if (value !== undefined && value !== null && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element. An attribute that is a function listens to the event of that name. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function superscript(integer) {
  const digits = [...String(Math.abs(integer))].map((digit) => kSuperscripts[Number(digit)]).join("");
  return (integer < 0 ? "⁻" : "") + digits;
}

/** "2⁻²⁴" */
function powerOfTwo(exponent) {
  return "2" + superscript(exponent);
}

/** Significant digits, by default three: "0.0123", "12,300", "1.23 × 10⁻⁷". */
function number(value, digits = 3) {
  if (!isNumber(value)) {
    return kNone;
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
    const [significand, exponent] = value.toExponential(digits - 1).split("e");
    return `${significand}${kSpace}×${kSpace}10${superscript(Number(exponent))}`;
  }
  return Number(value.toPrecision(digits)).toLocaleString("en-US", {maximumSignificantDigits: digits});
}

/** The number of a step: all of its digits, so that it can be looked up. */
function stepText(step) {
  return isNumber(step) ? step.toLocaleString("en-US") : kNone;
}

/** A whole number: all digits up to a million, then "1.23 M". */
function count(value) {
  if (!isNumber(value)) {
    return kNone;
  }
  const [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return unit === 1 ? Math.round(value).toLocaleString("en-US") : (value / unit).toPrecision(3) + kSpace + letter;
}

/** "1 step", "1,200 steps" */
function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A share of 1 as a percentage. Only none at all is 0 %, and only all is 100 %. */
function percent(share) {
  if (!isNumber(share)) {
    return kNone;
  }
  const value = share * 100;
  const digits = value === 0 || value === 100 ? String(value) : value.toPrecision(3);
  const words = value > 0 && value < 0.001 ? `<${kSpace}0.001` :
    value < 100 && digits === "100" ? `>${kSpace}99.9` :
                                      digits;
  return words + kSpace + "%";
}

function percentTick(share) {
  return number(share * 100) + kSpace + "%";
}

/** A measured number from 1 to 1,000 with all of its three digits, so that those of a column align. */
function measured(value) {
  return value >= 1 && value < 999.5 ? value.toPrecision(3) : number(value);
}

function seconds(value) {
  if (!isNumber(value)) {
    return kNone;
  }
  const [unit, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([size]) => value >= size) ?? [1e-9, "ns"];
  return value === 0 ? `0${kSpace}s` : measured(value / unit) + kSpace + name;
}

function bytes(value) {
  if (!isNumber(value)) {
    return kNone;
  }
  const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return (power === 0 ? count : measured)(value / 1024 ** power) + kSpace + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}

/** A loss scale: "2¹⁶ (65,536)" for a power of two, else a number. */
function scaleText(scale) {
  if (!isNumber(scale)) {
    return kNone;
  }
  const exponent = Math.log2(scale);
  return Number.isInteger(exponent) && Math.abs(exponent) > 3 ? powerOfTwo(exponent) : number(scale);
}

/** A long name without its middle. Most of what is kept is its end, since parameters' names differ there. */
function shorten(name, most) {
  if (name.length <= most) {
    return name;
  }
  const tail = Math.ceil((most - 1) * 0.7);
  return name.slice(0, most - 1 - tail) + "…" + name.slice(name.length - tail);
}

/** A name, shortened, with the whole of it as its title. */
function nameNode(name, most = 34) {
  return el("span", {class: "name", title: name}, shorten(name, most));
}
