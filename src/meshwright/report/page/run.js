// This page has no state of its own, and computes no values.
const WIDTH = 1120, HIGH = 230, LEFT = 74, BELOW = 22
const called = (group, kind) => nameOf(group, kind) || say.kinds[kind] || kind
const since = value => value ? seconds(value) : "0 s"
const finite = points => points.filter(([, value]) => value !== null)

// --- charts -----------------------------------------------------------------------------------------------------------------------

// Draws the axes of a chart, with five horizontal grid lines from `low` to `high`. Returns functions from values to coordinates.
function axes(low, high, last, show, unit) {
  const svg = make("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HIGH + BELOW}`, role: "img" })
  const x = value => LEFT + (WIDTH - LEFT) * (last[1] > last[0] ? (value - last[0]) / (last[1] - last[0]) : 0.5)
  const y = value => HIGH - (HIGH - 12) * (high > low ? (value - low) / (high - low) : 0.5)
  for (let at = 0; at <= 4; at += 1) {
    const value = low + (high - low) * at / 4
    svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value) }), make("text", { class: "right", x: LEFT - 8, y: y(value) + 4 }, show(value)))
    if (high === low) break
  }
  svg.append(make("text", { x: LEFT, y: HIGH + 17 }, unit(last[0])), make("text", { class: "right", x: WIDTH, y: HIGH + 17 }, unit(last[1])))
  return { svg, x, y }
}

const pathOf = (points, x, y) => points.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("")

function curve({ svg, x, y }, kind, points, words) {
  if (points.length === 1) return svg.append(make("circle", { class: `k-${kind}`, cx: x(points[0][0]), cy: y(points[0][1]), r: 3 }))
  svg.append(make("path", { class: `curve k-${kind}`, d: pathOf(points, x, y) }, make("title", {}, words)))
  if (points.length <= 40) svg.append(...points.map(([at, value]) => make("circle", { class: `k-${kind}`, cx: x(at), cy: y(value), r: 2.5 }, make("title", {}, `${say.stepAt(at)}: ${Number(value.toFixed(4))}`))))
}

function marks({ svg, x }, last) {
  for (const event of [...DATA.events, ...DATA.decisions].filter(event => event.step >= last[0] && event.step <= last[1])) {
    svg.append(make("line", { class: "event", x1: x(event.step), x2: x(event.step), y1: 12, y2: HIGH }, make("title", {}, `${say.stepAt(event.step)}: ${lineOf(event.cause || event.words)}`)))
  }
}

const stepName = value => say.stepAt(Math.round(value))

function drawLoss() {
  const train = finite(DATA.loss), held = finite(DATA.held)
  const all = [...train, ...held]
  if (!all.length) return fill("lossChart", make("p", { class: "note" }, say.noStep))
  const values = all.map(point => point[1]), steps = all.map(point => point[0]), last = [Math.min(...steps), Math.max(...steps)]
  const plot = axes(Math.min(...values), Math.max(...values), last, value => value.toFixed(Math.max(...values) - Math.min(...values) < 0.1 ? 4 : 2), stepName)
  marks(plot, last)
  if (train.length) curve(plot, "loss", train, say.train)
  if (held.length) curve(plot, "held", held, say.validation)
  return fill("lossChart", make("div", { class: "scroll" }, plot.svg), legend(["loss", say.train], held.length && ["held", say.validation], (DATA.events.length || DATA.decisions.length) && ["recovery", say.broke]))
}

function drawSeconds() {
  const points = finite(DATA.seconds), expected = DATA.time.find(row => row.name === "step")?.predicted
  document.getElementById("seconds").hidden = points.length < 2
  if (points.length < 2) return
  const last = [points[0][0], points[points.length - 1][0]]
  const plot = axes(0, Math.max(...points.map(point => point[1]), expected || 0), last, since, stepName)
  marks(plot, last)
  curve(plot, "compute", points, say.measured)
  if (expected) plot.svg.append(make("line", { class: "expected", x1: LEFT, x2: WIDTH, y1: plot.y(expected), y2: plot.y(expected) }, make("title", {}, `${say.predicted} ${seconds(expected)}`)))
  const key = legend(["compute", say.measured])
  if (expected) key.append(make("span", { class: "expected" }, `${say.predicted} ${seconds(expected)}`))
  fill("secondsChart", make("div", { class: "scroll" }, plot.svg), key)
}

// Draws the kinds of memory as stacked areas. The height of a time interval is the largest number of bytes allocated in it.
function drawTimeline() {
  const found = DATA.timeline
  document.getElementById("timeline").hidden = !found
  if (!found) return
  const expected = DATA.memory.find(row => row.name === "total")?.predicted
  const most = Math.max(found.total, expected || 0), count = found.columns.activations.length
  const plot = axes(0, most, [0, found.seconds], bytes, since)
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
  const most = Math.max(...rows.filter(row => row.name !== "resident").flatMap(row => [row.predicted || 0, row.measured || 0]), 1e-12)
  const colour = name => name.replace(/ .*/, "")
  const head = ["kind", "predicted", "measured", "ratio"].map(name => make("th", { scope: "col" }, say[name]))
  head.splice(1, 0, make("th", { class: "bars" }))
  const cell = (...inside) => make("td", {}, ...inside)
  table(id, head, rows.map(row => make("tr", {},
    cell(called(group, row.name)), make("td", { class: "bars" }, row.name === "resident" ? "" : bar([[colour(row.name), row.measured || 0, say.measured]], most, row.predicted ? row.predicted : undefined)),
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
  const loss = finite(DATA.loss), held = finite(DATA.held), total = DATA.memory.find(row => row.name === "total")
  const facts = [fact(say.plan, DATA.plan || say.unknown, "name"), DATA.ranks && fact(say.ranks, DATA.ranks),
    fact(say.trained, `${grouped(DATA.steps)}${DATA.planned ? ` ${say.of} ${grouped(DATA.planned)}` : ""} ${say.steps}`), fact(say.tokens, parameters(DATA.tokens)),
    loss.length && fact(say.lossNow, loss[loss.length - 1][1].toFixed(4)), held.length && fact(say.heldOutNow, held[held.length - 1][1].toFixed(4)),
    DATA.speed.measured && fact(say.speed, grouped(DATA.speed.measured)), DATA.speed.measured && DATA.ranks && fact(say.speedEach, grouped(DATA.speed.measured / DATA.ranks)), DATA.mfu.measured && fact("MFU", percent(DATA.mfu.measured)), total && total.measured && fact(say.peakRank, bytes(total.measured)), fact(say.saved, DATA.checkpoints ? String(DATA.checkpoints) : say.none)]
  fill("chosen", ...facts.filter(Boolean))
}

function drawRun() {
  fill("title", [...new Set([DATA.model, DATA.run])].filter(Boolean).join(" \u00b7 "))
  fill("subtitle", lineOf(DATA.balance))
  drawFacts()
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

begin({ draw: drawRun })
