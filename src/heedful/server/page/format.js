// Numbers as people read them, and a short way to make elements.

const UNITS = ["", "k", "M", "G", "T", "P", "E", "Z"];

// 1234567 → "1.23 M": decimal thousands, three significant digits, as the terminal has them.
export function human(number) {
  for (const unit of UNITS) {
    if (number < 999.5) {
      const digits = number >= 99.5 || unit === "" ? number.toFixed(0) : String(Number(number.toPrecision(3)));
      return unit ? `${digits} ${unit}` : digits;
    }
    number /= 1000;
  }
  return `${Math.round(number)} Y`;
}

export function bytes(number) {
  const text = human(number);
  return text.includes(" ") ? `${text}B` : `${text} B`;
}

export function whole(number) {
  return Math.round(number).toLocaleString("en");
}

// Two significant digits, without an exponent where there need be none.
export function short(number) {
  return number >= 10 ? whole(number) : String(Number(number.toPrecision(2)));
}

export function rate(number) {
  return number >= 100 ? number.toFixed(0) : number.toFixed(1);
}

export function seconds(number) {
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  return number < 100 ? `${number.toFixed(1)} s` : `${Math.floor(number / 60)} min ${Math.round(number % 60)} s`;
}

export function percent(part, of) {
  const share = of ? (100 * part) / of : 0;
  return share > 0 && share < 1 ? "<1 %" : share > 99 && share < 100 ? ">99 %" : `${Math.round(share)} %`;
}

// element("p", {class: "note"}, "text", child): texts become text nodes, never markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}
