// Creates HTML and SVG elements. Text is never interpreted as markup. The lengths of bars and charts are fractions of values in the data.
function make(tag, properties = {}, ...inside) {
  const spaced = tag === "svg" || ["rect", "text", "line", "path", "circle", "title"].includes(tag)
  const element = spaced ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (value !== undefined && value !== false) element.setAttribute(name, value)
  }
  element.append(...inside)
  return element
}

const fill = (id, ...inside) => document.getElementById(id).replaceChildren(...inside)

const table = (id, heads, rows) => fill(id, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))

// Returns a bar of parts [kind, value, tooltip]. The full width is `whole`. If `mark` is given, a line crosses the bar at this value.
function bar(parts, whole, mark) {
  const drawn = parts.filter(([, value]) => value > 0).map(([kind, value, words]) => make("i", { class: `k-${kind}`, style: `width:${100 * value / whole}%`, title: words }))
  if (mark !== undefined) drawn.push(make("u", { style: `left:${100 * mark / whole}%` }))
  return make("div", { class: "bar" }, ...drawn)
}

// Returns the colour and the text of each pair [kind, text]. False values are skipped.
const legend = (...pairs) => make("div", { class: "key" }, ...pairs.filter(Boolean).map(([kind, words]) => make("span", { class: `k-${kind}` }, words)))

const fact = (label, value, kind = "") => make("div", { class: kind }, make("small", {}, label), make("strong", {}, value))

// Draws a pipeline chart. An action has the idle time before it and its duration, in 1/10,000 of the chart's time.
function gantt(chart, words) {
  const width = 1120, label = 58, high = 24, gap = 5
  const scale = (width - label) / 10000
  const svg = make("svg", { viewBox: `0 0 ${width} ${chart.ranks.length * (high + gap) + 22}`, role: "img" }, make("title", {}, words.title))
  chart.rows.forEach((row, at) => {
    const top = at * (high + gap)
    const skipped = at > 0 && chart.ranks[at] - chart.ranks[at - 1] > 1
    svg.append(make("text", { x: 0, y: top + 16 }, `${skipped ? "\u22ee " : ""}${words.rank} ${chart.ranks[at]}`))
    svg.append(make("rect", { class: "lane", x: label, y: top, width: width - label, height: high }))
    for (let i = 0, end = 0; i < row.length; i += 5) {
      const [kind, turn, microBatch, idle, taken] = row.slice(i, i + 5)
      const start = end + idle
      end = start + taken
      const letter = "FBW"[kind], long = (end - start) * scale
      const name = `${words[letter]} ${microBatch}${chart.turns > 1 ? ` \u00b7 ${turn}` : ""}: ${seconds(start / 1e4 * chart.seconds)} \u2013 ${seconds(end / 1e4 * chart.seconds)}`
      svg.append(make("rect", { class: `action k-${letter}`, x: label + start * scale, y: top, width: Math.max(long, 0.5), height: high }, make("title", {}, name)))
      if (long > 14) svg.append(make("text", { class: `inside k-${letter}`, x: label + (start + end) / 2 * scale, y: top + 16 }, String(microBatch)))
    }
  })
  const bottom = chart.ranks.length * (high + gap) + 14
  svg.append(make("text", { x: label, y: bottom }, "0"), make("text", { x: width, y: bottom, "text-anchor": "end" }, seconds(chart.seconds)))
  return svg
}
