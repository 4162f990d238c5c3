// The texts of a page whose contrast with what is behind them is below 4.5, as WCAG 2.1 AA asks for.
() => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [red, green, blue] = color.match(/[\d.]+/g).slice(0, 3).map((one) => channel(Number(one) / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!/, 0\)$|transparent/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = new Set();
  for (const element of document.querySelectorAll("body *:not(:disabled)")) {
    const isText = element.textContent.trim() && !element.children.length && element.getClientRects().length;
    if (!isText || element.closest("svg, .skip")) continue;
    const found = [getComputedStyle(element).color, behind(element)].map(luminance).sort((one, other) => other - one);
    const ratio = (found[0] + 0.05) / (found[1] + 0.05);
    if (ratio < 4.5) faint.add(`${element.className || element.tagName}: ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return [...faint];
}
