// The state of this page: the range of steps that the charts show, the smoothing, and whether the axis of losses is logarithmic.
const FEW = 40
const COLOURS = ["loss", "held", "r2", "r3", "r4", "r5", "r6", "r7"]
const called = (group, kind) => nameOf(group, kind) || say.kinds[kind] || kind
const since = value => value ? seconds(value) : "0 s"
const finite = points => points.filter(([, value]) => value !== null)
const many = DATA.runs.length > 1

function heard(given) {
  const range = (given.get("steps") || "").split("-").map(Number), smooth = Number(given.get("smooth"))
  return { steps: range.length === 2 && range[1] > range[0] ? range : null, smooth: smooth > 0 && smooth < 100 ? smooth : 0, log: given.get("log") === "1" }
}

function tell(told) {
  if (state.steps) told.set("steps", state.steps.join("-"))
  if (state.smooth) told.set("smooth", state.smooth)
  if (state.log) told.set("log", "1")
}

// --- charts -----------------------------------------------------------------------------------------------------------------------

function marks({ svg, x }, last) {
  for (const event of [...DATA.events, ...DATA.decisions].filter(event => event.step >= last[0] && event.step <= last[1])) {
    svg.append(make("line", { class: "event", x1: x(event.step), x2: x(event.step), y1: 12, y2: HIGH }, make("title", {}, `${say.stepAt(event.step)}: ${lineOf(event.cause || event.words)}`)))
  }
}

// Returns the exponential moving average of a curve, without a bias towards its first value. `weight`: that of the past, 0 to 1.
function smoothed(points, weight) {
  let sum = 0, total = 0
  return points.map(([at, value]) => {
    sum = weight * sum + (1 - weight) * value
    total = weight * total + 1 - weight
    return [at, sum / total]
  })
}

// Draws curves over steps: { kind, name, points, dashed }. A pointer shows the values of a step, and dragging chooses a range of steps.
function plotSteps(id, curves, show, { log = false, smooth = 0, low, more = [] } = {}) {
  const all = curves.flatMap(each => each.points.map(point => point[0]))
  const whole = [Math.min(...all), Math.max(...all)], last = state.steps || whole
  const within = points => points.filter(([at]) => at >= last[0] && at <= last[1])
  const isSmoothed = each => smooth > 0 && each.points.length > FEW
  const shown = curves.map(each => ({ ...each, raw: isSmoothed(each) ? within(each.points) : [], points: within(isSmoothed(each) ? smoothed(each.points, smooth) : each.points) }))
  const values = [...shown.flatMap(each => [...each.points, ...each.raw].map(point => point[1])), ...more]
  if (!values.length) return fill(id, make("p", { class: "note" }, say.noStep))
  const bottom = low ?? Math.min(...values), top = Math.max(...values), scale = log && bottom > 0
  const plot = axes(bottom, top, last, show(top - bottom), value => String(Math.round(value * 100) / 100), { log: scale })
  marks(plot, last)
  for (const { kind, dashed, points, raw } of shown) {
    if (raw.length) plot.svg.append(make("path", { class: `curve faint k-${kind}`, d: pathOf(raw, plot.x, plot.y) }))
    plot.svg.append(make("path", { class: `curve k-${kind}${dashed ? " dashed" : ""}`, d: pathOf(points, plot.x, plot.y) }))
    if (points.length <= FEW) plot.svg.append(...points.map(([at, value]) => make("circle", { class: `k-${kind}`, cx: plot.x(at), cy: plot.y(value), r: points.length === 1 ? 3 : 2.5 })))
  }
  for (const value of more) plot.svg.append(make("line", { class: "expected", x1: LEFT, x2: WIDTH, y1: plot.y(value), y2: plot.y(value) }))
  const readout = make("p", { class: "note readout" }, say.hint)
  follow(plot, shown, last, readout, show(top - bottom))
  fill(id, readout, make("div", { class: "scroll" }, plot.svg))
}

function follow({ svg, x, y }, curves, last, readout, show) {
  const line = make("line", { class: "cursor", y1: 12, y2: HIGH }), area = make("rect", { class: "chosen", y: 12, height: HIGH - 12 }), dots = curves.map(({ kind }) => make("circle", { class: `k-${kind}`, r: 4 }))
  const stepOf = event => {
    const box = svg.getBoundingClientRect(), part = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT)
    return last[0] + Math.min(Math.max(part, 0), 1) * (last[1] - last[0])
  }
  let from = null
  const hide = () => { for (const each of [line, area, ...dots]) each.remove(); readout.textContent = say.hint }
  const move = event => {
    const at = stepOf(event)
    const near = curves.map(({ points }) => points.reduce((one, other) => one && Math.abs(one[0] - at) <= Math.abs(other[0] - at) ? one : other, null))
    const step = near.filter(Boolean).reduce((one, other) => Math.abs(one[0] - at) <= Math.abs(other[0] - at) ? one : other)[0]
    svg.append(line)
    line.setAttribute("x1", x(step)); line.setAttribute("x2", x(step))
    near.forEach((point, index) => { if (point) { dots[index].setAttribute("cx", x(point[0])); dots[index].setAttribute("cy", y(point[1])); svg.append(dots[index]) } })
    readout.textContent = `${say.stepAt(step)}: ${curves.map(({ name }, index) => near[index] && `${name} ${show(near[index][1])}${near[index][0] === step ? "" : ` (${say.stepAt(near[index][0])})`}`).filter(Boolean).join(" \u00b7 ")}`
    if (from !== null) {
      area.setAttribute("x", Math.min(x(from), x(at))); area.setAttribute("width", Math.abs(x(at) - x(from)))
      svg.append(area)
    }
  }
  svg.addEventListener("pointermove", move)
  svg.addEventListener("pointerleave", () => { if (from === null) hide() })
  svg.addEventListener("pointerdown", event => { from = stepOf(event); if (event.pointerId) svg.setPointerCapture?.(event.pointerId) })
  svg.addEventListener("pointerup", event => {
    const range = [from, stepOf(event)].sort((one, other) => one - other).map(Math.round)
    from = null
    if (range[1] - range[0] >= Math.max(1, (last[1] - last[0]) / 100)) write({ steps: range })
    else hide()
  })
  svg.addEventListener("dblclick", () => write({ steps: null }))
}

function drawTools() {
  const input = make("input", { type: "range", min: 0, max: 99, step: 1, "aria-label": say.smoothing, oninput: event => write({ smooth: Number(event.target.value) }) })
  const log = make("input", { type: "checkbox", id: "log", onchange: event => write({ log: event.target.checked }) })
  const there = document.getElementById("tools").querySelector("input")
  if (!there) fill("tools", make("label", {}, make("span", {}), input), make("label", {}, log, make("span", {})), make("button", { type: "button", onclick: () => write({ steps: null }) }))
  const [smoothing, scale, all] = document.getElementById("tools").children
  smoothing.children[0].textContent = `${say.smoothing} ${(state.smooth / 100).toFixed(2)}`
  smoothing.children[1].value = state.smooth
  scale.children[0].checked = state.log
  scale.children[1].textContent = say.logAxis
  all.textContent = say.allSteps
  all.hidden = !state.steps
}

const nameOfCurve = (run, what) => many ? [run.name, what].filter(Boolean).join(", ") : what
const colourOf = index => COLOURS[index % COLOURS.length]
const digits = range => value => Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-4) ? value.toExponential(2) : Number(value.toFixed(range < 0.1 ? 5 : range < 10 ? 4 : 2)).toString()

function drawLoss() {
  const curves = DATA.runs.flatMap((run, index) => [
    { kind: many ? colourOf(index) : "loss", name: nameOfCurve(run, many ? "" : say.train), points: finite(run.loss) },
    { kind: many ? colourOf(index) : "held", name: nameOfCurve(run, say.validation), points: finite(run.held), dashed: many },
  ]).filter(each => each.points.length)
  if (!curves.length) return fill("lossChart", make("p", { class: "note" }, say.noStep))
  plotSteps("lossChart", curves, digits, { log: state.log, smooth: state.smooth / 100 })
  document.getElementById("lossChart").append(legend(...curves.filter(each => !each.dashed).map(each => [each.kind, each.name]), (DATA.events.length || DATA.decisions.length) && ["recovery", say.broke]))
  if (many) document.getElementById("lossChart").append(make("p", { class: "note" }, say.runsNote(DATA.runs[0].name)))
}

function drawSeconds() {
  const curves = DATA.runs.map((run, index) => ({ kind: many ? colourOf(index) : "compute", name: nameOfCurve(run, many ? "" : say.measured), points: finite(run.seconds) })).filter(each => each.points.length > 1)
  const expected = DATA.time.find(row => row.name === "step")?.predicted
  document.getElementById("seconds").hidden = !curves.length
  if (!curves.length) return
  plotSteps("secondsChart", curves, () => since, { low: 0, more: expected ? [expected] : [] })
  const key = legend(...curves.map(each => [each.kind, each.name]))
  if (expected) key.append(make("span", { class: "expected" }, `${say.predicted} ${seconds(expected)}`))
  document.getElementById("secondsChart").append(key)
}

// Draws the kinds of memory as stacked areas. The height of a time interval is the largest number of bytes allocated in it.
function drawTimeline() {
  const found = DATA.timeline
  document.getElementById("timeline").hidden = !found
  if (!found) return
  const expected = DATA.memory.find(row => row.name === "total")?.predicted
  const most = Math.max(found.total, expected || 0), count = found.columns.activations.length
  const plot = axes(0, most, [0, found.seconds], bytes, since, { base: 1024 })
  const kinds = Object.keys(found.columns)
  const below = Array(count).fill(0)
  for (const kind of kinds) {
    const floor = [...below]
    found.columns[kind].forEach((size, at) => { below[at] += Math.max(size, 0) })
    const steps = row => row.flatMap((size, at) => [[at / count * found.seconds, size], [(at + 1) / count * found.seconds, size]])
    const outline = `${pathOf(steps(below), plot.x, plot.y)}L${pathOf(steps(floor).reverse(), plot.x, plot.y).slice(1)}Z`
    plot.svg.append(make("path", { class: `area k-${kind}`, d: outline }, make("title", {}, called("memory", kind))))
  }
  if (expected) plot.svg.append(make("line", { class: "expected", x1: LEFT, x2: WIDTH, y1: plot.y(expected), y2: plot.y(expected) }))
  const key = legend(...kinds.map(kind => [kind, called("memory", kind)]))
  if (expected) key.append(make("span", { class: "expected" }, `${say.predicted} ${bytes(expected)}`))
  fill("timelineChart", make("div", { class: "scroll" }, plot.svg), key, make("p", { class: "note" }, say.timelineNote(found.step, found.rank, bytes(found.total), seconds(found.at), seconds(found.seconds), found.place)))
}

// --- tables -----------------------------------------------------------------------------------------------------------------------

function drawPairs(id, group, rows, show) {
  const ofProcess = new Set(["resident", "process", "copies"])  // much larger than the rest on a CPU
  const most = Math.max(...rows.filter(row => !ofProcess.has(row.name)).flatMap(row => [row.predicted || 0, row.measured || 0]), 1e-12)
  const colour = name => name.replace(/ .*/, "")
  const head = ["kind", "predicted", "measured", "ratio"].map(name => make("th", { scope: "col" }, say[name]))
  head.splice(1, 0, make("th", { class: "bars" }))
  const cell = (...inside) => make("td", {}, ...inside)
  table(id, head, rows.map(row => make("tr", {},
    cell(called(group, row.name)), make("td", { class: "bars" }, ofProcess.has(row.name) ? "" : bar([[colour(row.name), row.measured || 0, say.measured]], most, row.predicted ? row.predicted : undefined)),
    cell(row.predicted === null ? "\u2013" : show(row.predicted)), cell(row.within ? say.inside(called(group, row.within)) : row.measured === null ? "\u2013" : show(row.measured)),
    cell(row.ratio === null ? "" : row.ratio.toFixed(2)))))
  document.getElementById(group).hidden = !rows.length
}

function drawEvents() {
  const head = ["step", "rank", "phase", "cause", "noticed", "recovered", "lost", "again"].map((name, index) => make("th", { scope: "col", class: index === 3 ? "left" : "" }, say[name]))
  const rows = DATA.events.map(event => make("tr", {}, ...[event.step, event.ranks, lineOf(event.phase)].map(word => make("td", {}, String(word))), make("td", { class: "left text" }, lineOf(event.cause)),
    ...[event.noticed ? seconds(event.noticed) : "", ...(event.seconds === null ? ["", "", ""] : [say.from(seconds(event.seconds), event.source), seconds(event.lost), String(event.again)])].map(word => make("td", {}, word))))
  if (rows.length) table("eventRows", head, rows)
  else fill("eventRows", make("caption", { class: "note" }, say.nothing))
}

function drawDecisions() {
  document.getElementById("decisions").hidden = !DATA.decisions.length
  const head = ["step", "rank", "decided", "faster", "reached"].map((name, index) => make("th", { scope: "col", class: index === 2 ? "left" : "" }, say[name]))
  const times = gain => gain ? gain.toFixed(2) : ""
  table("decisionRows", head, DATA.decisions.map(row => make("tr", {}, make("td", {}, String(row.step)), make("td", {}, row.ranks), make("td", { class: "left text" }, lineOf(row.words)), make("td", {}, times(row.predicted)), make("td", {}, times(row.measured)))))
}

function drawGoodput() {
  document.getElementById("goodput").hidden = !DATA.goodput
  if (!DATA.goodput) return
  const words = { useful: say.useful, data: say.data, skipped: say.skipped, between: say.between, again: say.rerun, saves: say.saves, detection: say.detection, recovery: say.recovery }
  const kinds = Object.keys(words).filter(kind => DATA.goodput[kind] > 0)
  const whole = kinds.reduce((sum, kind) => sum + DATA.goodput[kind], 0)
  const colour = kind => kind === "data" ? "waiting" : kind
  const rows = kinds.flatMap(kind => [make("span", {}, words[kind]), bar([[colour(kind), DATA.goodput[kind], ""]], whole), make("span", { class: "end" }, seconds(DATA.goodput[kind])), make("span", { class: "end quiet" }, percent(DATA.goodput[kind] / whole))])
  fill("goodputBar", make("div", { class: "rows" }, ...rows))
}

function drawFacts() {
  const { loss, held } = DATA.last, total = DATA.memory.find(row => row.name === "total")
  const facts = [fact(say.plan, DATA.plan || say.unknown, "name"), DATA.ranks && fact(say.ranks, DATA.ranks),
    fact(say.trained, `${grouped(DATA.steps)}${DATA.planned ? ` ${say.of} ${grouped(DATA.planned)}` : ""} ${say.steps}`), fact(say.tokens, parameters(DATA.tokens)),
    loss !== null && fact(say.lossNow, loss.toFixed(4)), held !== null && fact(say.heldOutNow, held.toFixed(4)),
    DATA.speed.measured && fact(say.speed, grouped(DATA.speed.measured)), DATA.speed.measured && DATA.ranks && fact(say.speedEach, grouped(DATA.speed.measured / DATA.ranks)), DATA.mfu.measured && fact("MFU", percent(DATA.mfu.measured)), total && total.measured && fact(say.peakRank, bytes(total.measured)), fact(say.saved, DATA.checkpoints ? String(DATA.checkpoints) : say.none)]
  fill("chosen", ...facts.filter(Boolean))
}

function drawRun() {
  fill("title", [...new Set([DATA.model, DATA.run])].filter(Boolean).join(" \u00b7 "))
  fill("subtitle", lineOf(DATA.balance))
  drawFacts()
  drawTools()
  drawLoss()
  drawPairs("timeRows", "time", DATA.time, seconds)
  drawPairs("memoryRows", "memory", DATA.memory, bytes)
  drawSeconds()
  drawTimeline()
  drawEvents()
  drawDecisions()
  drawGoodput()
  fill("made", say.made(DATA.version, DATA.folder))
}

begin({ read: heard, tell, draw: drawRun, keys: { 0: () => write({ steps: null }) } })
