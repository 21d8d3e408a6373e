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
  const width = WIDTH, label = 58, high = 24, gap = 5
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

// The height of the axis of a plot, the space to the left of it and below it.
const HIGH = 230, LEFT = 74, BELOW = 22
// The width of a chart. Charts are as wide as the page, so that they fit on a phone with text of the usual size.
let WIDTH = 1120

function fitCharts() {
  const before = WIDTH
  WIDTH = Math.min(Math.max(document.querySelector("main").clientWidth, 280), 1120)
  return WIDTH !== before
}

// Returns about five round numbers from `low` to `high`: 1, 2 or 5 times a power of ten, with `base` 1024 powers of two times a unit of bytes.
function ticks(low, high, base = 10) {
  if (!(high > low)) return [low]
  const rough = (high - low) / 5, unit = base === 10 ? 10 ** Math.floor(Math.log10(rough)) : 2 ** Math.floor(Math.log2(rough))
  const step = unit * (base === 10 ? [1, 2, 5, 10] : [1, 2]).find(factor => factor * unit >= rough * 0.999)
  const first = Math.ceil(low / step - 1e-9)
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)))
}

// The ticks of a logarithmic axis: 1, 2 and 5 times the powers of ten, or round numbers if these are too few.
function logTicks(low, high) {
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, index) => 10 ** (Math.floor(Math.log10(low)) + index))
  const found = powers.flatMap(power => [1, 2, 5].map(factor => Number((factor * power).toPrecision(12)))).filter(value => value >= low && value <= high)
  return found.length > 2 ? found : ticks(low, high)
}

// Draws the axes of a chart with round ticks. Returns functions from values to coordinates. `show` and `unit` format the values of the two axes.
// `marks` are the ticks of the horizontal axis as [position, value] instead of round ones; marks that would overlap are omitted.
function axes(low, high, last, show, unit, { log = false, base = 10, marks } = {}) {
  const svg = make("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HIGH + BELOW}`, role: "img" })
  const on = log ? Math.log : value => value
  const x = value => LEFT + (WIDTH - LEFT) * (last[1] > last[0] ? (value - last[0]) / (last[1] - last[0]) : 0.5)
  const y = value => HIGH - (HIGH - 12) * (high > low ? (on(value) - on(low)) / (on(high) - on(low)) : 0.5)
  for (const value of log ? logTicks(low, high) : ticks(low, high, base)) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value) }), make("text", { class: "right", x: LEFT - 8, y: y(value) + 4 }, show(value)))
  }
  let free = 0
  for (const [place, value] of marks || ticks(last[0], last[1]).map(value => [value, value])) {
    const at = x(place)
    if (marks && at < free) continue
    free = at + 100
    svg.append(make("line", { class: "grid", x1: at, x2: at, y1: HIGH, y2: HIGH + 4 }), make("text", { class: at > WIDTH - 30 ? "right" : "middle", x: at, y: HIGH + 17 }, unit(value)))
  }
  return { svg, x, y }
}

const pathOf = (points, x, y) => points.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("")
