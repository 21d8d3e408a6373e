// The state of this page: the positions of four sliders, the selected plan, the plan that it is compared with, pins, and the sort order.
for (const point of DATA.points) point.plans = point.plans.map(row => Object.fromEntries(DATA.keys.entry.map((key, index) => [key, row[index]])))
const SLIDERS = ["devices", "batch", "sequence", "memory"]
const TIME = DATA.keys.time, MEMORY = DATA.keys.memory
const ITEMS = TIME.filter(kind => kind !== "step"), KINDS = MEMORY.filter(kind => kind !== "total" && kind !== "reserved")
const WAITING = ["tensor", "data", "pipeline", "context", "expert"]
const at = (entry, kind) => entry.time[TIME.indexOf(kind)]
const size = (entry, kind, row = entry.fullest) => entry.memory[row][MEMORY.indexOf(kind)]
const PINS = { tp: /(?:^|\.)tp(\d+)/, pp: /(?:^|\.)pp(\d+)/, zero: /(?:^|\.)z([0-3])/ }
// Returns the degree of a plan that a pin fixes. A name leaves out tp1, pp1 and z0.
const degree = (entry, pin) => (PINS[pin].exec(entry.name) || [])[1] || (pin === "zero" ? "0" : "1")
const exposed = entry => WAITING.reduce((sum, kind) => sum + at(entry, kind), 0)

// The columns of the table of plans, each with its sort key. A column without a key cannot be sorted.
const COLUMNS = {
  plan: row => row.entry.name, step: row => at(row.entry, "step"), timeShares: undefined, speed: row => -row.entry.speed, mfu: row => -row.entry.mfu,
  reserved: row => size(row.entry, "reserved"), memoryShares: undefined, verdict: undefined, spare: row => size(row.entry, "reserved"),
  bubble: row => at(row.entry, "bubble") / at(row.entry, "step"), exposed: row => exposed(row.entry) / at(row.entry, "step"),
}

// --- URL fragment ----------------------------------------------------------------------------------------------------------------

function heard(given) {
  const stops = SLIDERS.map((name, axis) => {
    const found = DATA.axes[name].findIndex(stop => String(stop) === given.get(name))
    return found < 0 ? DATA.here[axis] : found
  })
  const pins = Object.fromEntries(Object.keys(PINS).map(pin => [pin, given.get(pin) || ""]))
  return { stops, plan: given.get("plan"), with: given.get("with"), pins, sort: given.get("sort") || "" }
}

function tell(told) {
  SLIDERS.forEach((name, axis) => { if (state.stops[axis] !== DATA.here[axis]) told.set(name, DATA.axes[name][state.stops[axis]]) })
  if (state.plan) told.set("plan", state.plan)
  if (state.with) told.set("with", state.with)
  for (const [pin, value] of Object.entries(state.pins)) if (value) told.set(pin, value)
  if (state.sort) told.set("sort", state.sort)
}

// Redraws the page after a change, and restores the focus, since the focused element was replaced.
function again(changes, where) {
  write(changes)
  document.querySelector(where).focus()
}

// --- the selected setting and plan -----------------------------------------------------------------------------------------------

// Returns the results for positions of the sliders.
function resultsAt([devices, batch, sequence, memory]) {
  const place = (devices * DATA.axes.batch.length + batch) * DATA.axes.sequence.length + sequence
  return { place, point: DATA.points[place], standing: DATA.points[place].standings[memory] }
}

function look() {
  const [devices] = state.stops
  const { place, point, standing } = resultsAt(state.stops)
  const ranked = (standing ? standing.ranked : []).map(([index, verdict]) => ({ entry: point.plans[index], verdict }))
  const isPinned = Object.values(state.pins).some(Boolean)
  const matches = row => Object.entries(state.pins).every(([pin, value]) => !value || degree(row.entry, pin) === value)
  const relatives = (standing ? standing.families : []).map(([family, index, verdict]) => ({ family: DATA.families[family], entry: point.plans[index], verdict }))
  const all = [...ranked, ...relatives.filter(row => !ranked.some(other => other.entry === row.entry))]
  const rows = isPinned ? all.filter(row => row.verdict !== "no" && matches(row)) : ranked
  const kin = relatives.filter(matches)
  const by = COLUMNS[state.sort.replace("-", "")], way = state.sort.startsWith("-") ? -1 : 1
  const sorted = by ? [...rows].sort((one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : 0) * way) : rows
  const selected = [...rows, ...kin].find(row => row.entry.name === state.plan) || rows[0] || kin[0]
  return { place, point, standing, rows, sorted, kin, all, isPinned, selected, cluster: DATA.clusters[devices] }
}

// Quotes a word for a shell if necessary.
const quoted = word => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`

function command(view) {
  const [, batch, sequence, memory] = SLIDERS.map((name, axis) => DATA.axes[name][state.stops[axis]])
  const words = [...DATA.command]
  const own = state.stops[3] === DATA.here[3]
  const limit = Number.isInteger(memory / 2 ** 30) ? `${memory / 2 ** 30}GiB` : String(memory)
  if (view.cluster !== null) words.push(...(own || DATA.budget ? ["--cluster", view.cluster] : ["--set", `cluster.name=${view.cluster}`]))
  if (DATA.budget) words.push("--budget", limit)
  else if (!own) words.push("--set", `cluster.memory=${limit}`)
  const pins = Object.entries(state.pins).filter(([, value]) => value).map(pin => pin.join("="))
  return [...words, "--batch", String(batch), "--seq", String(sequence), ...(pins.length ? ["--pin", pins.join(",")] : [])].map(quoted).join(" ")
}

// --- drawing ---------------------------------------------------------------------------------------------------------------------

function drawAnswer() {
  const view = look()
  fill("copy", say.copy)
  fill("title", `${DATA.model.name} \u00b7 ${view.cluster || `${DATA.axes.devices[state.stops[0]]} ${say.devices}`}`)
  fill("subtitle", say.subtitle({ ...DATA.model, parameters: parameters(DATA.model.parameters) }, DATA.precision, DATA.optimizer))
  drawSliders()
  drawChosen(view)
  drawPins(view)
  drawPlans(view)
  drawCompare(view)
  drawChanges()
  for (const element of document.querySelectorAll(".selected")) element.textContent = view.selected ? view.selected.entry.name : ""
  drawMemory(view)
  drawTime(view)
  drawPipeline(view)
  document.getElementById("plans").hidden = !view.rows.length && !view.isPinned
  for (const id of ["ranks", "pipeline"]) document.getElementById(id).hidden = !view.selected || view.selected.entry.of === 1
  drawFamilies(view)
  drawRejected(view)
  fill("words", command(view))
  fill("made", say.made(DATA.version, grouped(view.point.considered)))
}

function drawSliders() {
  const form = document.getElementById("sliders")
  if (!form.children.length) {
    form.append(...SLIDERS.map((name, axis) => make("div", {},
      make("label", { for: `slider-${name}` }, make("span", {}), make("output", { for: `slider-${name}` })),
      make("input", { type: "range", id: `slider-${name}`, min: 0, max: Math.max(DATA.axes[name].length - 1, 1), step: 1, disabled: DATA.axes[name].length < 2 && "",
        oninput: event => write({ stops: state.stops.map((stop, other) => other === axis ? Number(event.target.value) : stop) }) }),
      make("div", { class: "stops", "aria-hidden": "true" }))))
  }
  SLIDERS.forEach((name, axis) => {
    const show = name === "memory" ? round : grouped
    const [label, input, stops] = form.children[axis].children
    label.children[0].textContent = name === "memory" ? (DATA.budget ? say.budgetSlider : say.memorySlider) : say[name]
    label.children[1].textContent = show(DATA.axes[name][state.stops[axis]])
    input.value = state.stops[axis]
    input.setAttribute("aria-valuetext", show(DATA.axes[name][state.stops[axis]]))
    stops.replaceChildren(...DATA.axes[name].map((stop, index) => make(index === DATA.here[axis] ? "b" : "span", {}, name === "memory" ? round(stop).replace(" GiB", "") : grouped(stop))))
  })
}

function drawChosen(view) {
  if (!view.rows.length && view.isPinned) return fill("chosen", make("p", {}, make("b", {}, say.noneShown), ` ${say.pinsNote}`))
  if (!view.rows.length) {
    const kin = view.kin[0]
    const why = lineOf(view.point.error) || (kin ? say.nearest(kin.entry.name, bytes(size(kin.entry, "reserved")), bytes(view.standing.limit)) : "")
    return fill("chosen", make("p", {}, make("b", { class: "no" }, say.none), ` ${why}`))
  }
  const { entry, verdict } = view.rows[0]
  return fill("chosen", fact(view.isPinned ? say.pinned : say.chosen, make("span", {}, ...parts(entry.name)), "name"), fact(say.step, stepOf(at(entry, "step"))), fact(say.speed, grouped(entry.speed)),
    fact(say.mfu, `${(100 * entry.mfu).toFixed(1)}%`), fact(say.reserved, `${bytes(size(entry, "reserved"))} ${say.of} ${bytes(limitOf(entry, view))}`), fact("\u00a0", say[verdict], verdict))
}

function drawPlans(view) {
  const cell = (...inside) => make("td", {}, ...inside)
  const heads = Object.entries(COLUMNS).map(([name, by]) => {
    const sorted = state.sort.replace("-", "") === name && by ? (state.sort.startsWith("-") ? "descending" : "ascending") : undefined
    const next = sorted === "ascending" ? `-${name}` : sorted === "descending" ? "" : name
    return make("th", { scope: "col", "aria-sort": sorted, class: by || name === "verdict" ? "" : "bars", title: say.explain.column[name] }, by ? make("button", { type: "button", "data-sort": name, onclick: () => again({ sort: next }, `[data-sort=${name}]`) }, say[name]) : say[name])
  })
  const slowest = Math.max(...view.rows.map(row => at(row.entry, "step")))
  const rows = view.sorted.map(row => {
    const { entry, verdict } = row, step = at(entry, "step"), limit = limitOf(entry, view)
    const chosen = entry === view.selected.entry
    return make("tr", { tabindex: chosen ? 0 : -1, "aria-selected": String(chosen), "data-plan": entry.name, onclick: () => write({ plan: entry.name }) },
      make("td", { class: "plan" }, ...planOf(entry)), cell(stepOf(step)), make("td", { class: "bars" }, timeBar(entry, slowest)), cell(grouped(entry.speed)), cell(`${(100 * entry.mfu).toFixed(1)}%`),
      cell(bytes(size(entry, "reserved"))), make("td", { class: "bars" }, memoryBar(entry, entry.fullest, limit)), make("td", { class: `left ${verdict}` }, say[verdict]),
      cell(percent((limit - size(entry, "reserved")) / limit)), cell(percent(at(entry, "bubble") / step)), cell(percent(exposed(entry) / step)))
  })
  table("ranked", heads, rows)
  fill("order", say[DATA.objective])
  fill("missing", [...view.rows, ...view.kin].some(row => row.entry.missing) ? say.missingNote : "")
}

// For each slider, a table and a plot of the best plan at each of its positions, while the other sliders stay.
function drawChanges() {
  fill("changed", ...SLIDERS.flatMap((name, axis) => {
    const show = name === "memory" ? round : grouped
    const label = name === "memory" ? (DATA.budget ? say.budgetSlider : say.memorySlider) : say[name]
    const found = DATA.axes[name].map((stop, index) => {
      const stops = state.stops.map((own, other) => other === axis ? index : own)
      const { point, standing } = resultsAt(stops)
      const [best, verdict] = standing?.ranked[0] || []
      return { stop, index, stops, entry: point.plans[best], verdict: verdict || "no" }
    })
    const fitting = found.filter(row => row.entry)
    if (found.length < 2 || !fitting.length) return []
    const linear = row => name === "devices" ? fitting[0].entry.speed * row.stop / fitting[0].stop : 0
    const { svg, x, y } = axes(0, Math.max(...fitting.map(row => Math.max(row.entry.speed, linear(row)))), [0, found.length - 1], grouped, index => Number.isInteger(index) ? show(DATA.axes[name][index]) : "")
    svg.append(make("title", {}, `${say.speed}, ${label}`))
    if (name === "devices") svg.append(make("path", { class: "expected", d: pathOf(fitting.map(row => [row.index, linear(row)]), x, y) }, make("title", {}, say.linear)))
    svg.append(make("path", { class: "curve k-compute", d: pathOf(fitting.map(row => [row.index, row.entry.speed]), x, y) }))
    svg.append(...fitting.map(row => make("circle", { class: "k-compute", cx: x(row.index), cy: y(row.entry.speed), r: row.index === state.stops[axis] ? 6 : 3.5 }, make("title", {}, `${show(row.stop)}: ${grouped(row.entry.speed)}, ${row.entry.name}`))))
    const heads = [label, say.plan, say.step, say.speed, ...(name === "devices" ? [say.scaling] : []), say.mfu, say.reserved, ""].map((head, index) => make("th", { scope: "col", class: index === 1 ? "left" : "" }, head))
    const rows = found.map(row => {
      const { entry } = row
      const values = entry ? [stepOf(at(entry, "step")), grouped(entry.speed), ...(name === "devices" ? [percent(entry.speed / linear(row))] : []), `${(100 * entry.mfu).toFixed(1)}%`, bytes(size(entry, "reserved"))] : heads.slice(3).map(() => "\u2013")
      return make("tr", { "aria-selected": String(row.index === state.stops[axis]), onclick: () => write({ stops: row.stops }) },
        make("td", {}, show(row.stop)), make("td", { class: "left plan" }, ...(entry ? planOf(entry) : [])), ...values.map(value => make("td", {}, value)), make("td", { class: `left ${row.verdict}` }, say[row.verdict]))
    })
    return [make("div", { class: "scroll" }, make("table", { id: `changed-${name}` }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))), make("div", { class: "scroll" }, svg)]
  }))
}

// Returns what a part of a plan's name means.
function meaning(part) {
  const [pattern, words] = Object.values(say.parts).find(([pattern]) => new RegExp(`^(?:${pattern})$`).test(part)) || ["", ""]
  return pattern && part.replace(new RegExp(`^(?:${pattern})$`), words)
}

const parts = name => name.split(/(?<=\.)/).flatMap(part => [make("span", { class: "part", title: meaning(part.replace(".", "")) }, part), make("wbr")])
const termOf = (group, kind) => make("span", { class: "term", title: say.explain[group][kind] }, nameOf(group, kind))
const planOf = entry => [make("code", {}, ...parts(entry.name)), ...(entry.missing ? [make("small", { title: say.missing(entry.missing) }, "\u25cb")] : [])]
const timeBar = (entry, whole) => bar(ITEMS.map(kind => [kind, at(entry, kind), `${nameOf("time", kind)} ${seconds(at(entry, kind))}: ${say.explain.time[kind]}`]), whole)
// Returns the usable memory of a rank, by default of the peak-memory rank. On heterogeneous devices, ranks have different limits.
const limitOf = (entry, view, row = entry.fullest) => entry.limits ? entry.limits[row] : view.standing.limit

const memoryBar = (entry, row, limit, whole = limit) => bar(KINDS.map(kind => [kind, size(entry, kind, row), `${nameOf("memory", kind)} ${bytes(size(entry, kind, row))}`]), whole, limit)

function drawMemory(view) {
  if (!view.selected) { fill("memoryBars"); return fill("rankBars") }
  const { entry } = view.selected, limit = limitOf(entry, view)
  const most = Math.max(limit, size(entry, "total"))
  const kinds = KINDS.flatMap(kind => [termOf("memory", kind), bar([[kind, size(entry, kind), ""]], most), make("span", { class: "end" }, bytes(size(entry, kind))), make("span", { class: "end quiet" }, percent(size(entry, kind) / limit))])
  const sums = ["total", "reserved"].flatMap(kind => [make("b", {}, termOf("memory", kind)), kind === "total" ? memoryBar(entry, entry.fullest, limit, most) : make("span", {}), make("b", { class: "end" }, bytes(size(entry, kind))), make("span", { class: "end quiet" }, percent(size(entry, kind) / limit))])
  fill("memoryBars", make("div", { class: "rows" }, ...kinds, make("div", { class: "rule" }), ...sums))
  const limits = entry.ranks.map((_, row) => limitOf(entry, view, row))
  const whole = Math.max(...limits, ...entry.ranks.map((_, row) => size(entry, "total", row))) * 1.005
  const stages = entry.ranks.flatMap((rank, row) => [make("span", { class: "quiet" }, `${say.rank} ${rank}`), memoryBar(entry, row, limitOf(entry, view, row), whole), make("span", { class: "end" }, bytes(size(entry, "total", row)))])
  const key = legend(...KINDS.map(kind => [kind, nameOf("memory", kind)]))
  key.append(make("span", { class: "limit" }, `${say.limit}: ${[...new Set(limits.map(bytes))].join(", ")}`))
  return fill("rankBars", make("div", { class: "rows stages" }, ...stages), key, make("p", { class: "note" }, say.ranksNote(entry.ranks.length, entry.of)))
}

function drawTime(view) {
  if (!view.selected) return fill("timeBars")
  const { entry } = view.selected, step = at(entry, "step")
  const items = ITEMS.filter(kind => at(entry, kind) > 0)
  const rows = items.flatMap(kind => [termOf("time", kind), bar([[kind, at(entry, kind), ""]], step), make("span", { class: "end" }, seconds(at(entry, kind))), make("span", { class: "end quiet" }, percent(at(entry, kind) / step))])
  const sum = [make("b", {}, termOf("time", "step")), timeBar(entry, step), make("b", { class: "end" }, seconds(step)), make("span", { class: "end quiet" }, "100%")]
  return fill("timeBars", make("div", { class: "rows" }, ...rows, make("div", { class: "rule" }), ...sum))
}

function drawPipeline(view) {
  const chart = view.selected && DATA.charts[`${view.place} ${view.selected.entry.name}`]
  if (!chart) return fill("chart", make("p", { class: "note" }, view.selected ? say.noChart : ""))
  const caption = say.chartCaption(chart.count, chart.of, seconds(chart.seconds)) + say.chartRanks(chart.ranks.length, view.selected.entry.of)
  const kinds = ["F", "B", "W"].filter((_, kind) => chart.rows.some(row => row.some((number, i) => i % 5 === 0 && number === kind)))
  const key = legend(...kinds.map(kind => [kind, say[kind]]))
  key.append(make("span", { class: "idle" }, say.idle))
  return fill("chart", make("div", { class: "scroll" }, gantt(chart, { ...say, title: caption })), key, make("p", { class: "note" }, caption))
}

// Draws the menus of the degrees that a plan may have. Their values are those of the plans of this setting.
function drawPins(view) {
  const menus = Object.keys(PINS).map(pin => {
    const values = [...new Set([...view.all.map(row => degree(row.entry, pin)), state.pins[pin]].filter(Boolean))].sort((one, other) => one - other)
    const option = value => make("option", { value, selected: state.pins[pin] === value && "" }, value || say.any)
    return make("label", {}, pin === "zero" ? "ZeRO" : pin, make("select", { id: `pin-${pin}`, onchange: event => again({ pins: { ...state.pins, [pin]: event.target.value } }, `#pin-${pin}`) }, ...["", ...values].map(option)))
  })
  fill("pins", make("span", {}, say.pins), ...menus, ...(view.isPinned ? [make("span", { class: "note" }, view.rows.length ? say.pinsNote : say.noneShown)] : []))
}

// Shows why the selected plan is not the first one, and both plans term by term. Without another choice it is compared with the first one.
function drawCompare(view) {
  const one = view.selected, others = view.all.filter(row => row.entry !== one?.entry)
  const other = others.find(row => row.entry.name === state.with) || others[0]
  document.getElementById("compare").hidden = !one || !other
  if (!one || !other) return
  const isFirst = one.entry === view.all[0].entry
  fill("whyNot", isFirst ? say.compare : say.whyNot(one.entry.name))
  const more = at(one.entry, "step") / at(other.entry, "step") - 1
  const terms = ITEMS.map(kind => [kind, at(one.entry, kind) - at(other.entry, kind)]).filter(([, lost]) => lost > 0.001 * at(other.entry, "step")).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, lost]) => `${nameOf("time", kind)} +${seconds(lost)}`).join(", ")
  const limit = limitOf(one.entry, view)
  const lines = [one.verdict === "no" && say.tooLarge(one.entry.name, bytes(size(one.entry, "reserved")), bytes(limit)), more >= 0 ? say.slower(one.entry.name, other.entry.name, percent(more, true).replace("+", ""), terms) : say.faster(one.entry.name, other.entry.name, percent(-more, true).replace("+", "")), one.verdict === "tight" && say.isTight(one.entry.name)]
  fill("reason", lines.filter(Boolean).join(" "))
  const select = document.getElementById("other")
  select.replaceChildren(...others.map(row => make("option", { value: row.entry.name, selected: row === other && "" }, row.entry.name)))
  select.onchange = () => write({ with: select.value })
  const signed = (value, show) => Math.abs(value) < 1e-12 ? "" : `${value > 0 ? "+" : "\u2212"}${show(Math.abs(value))}`
  const row = (label, of, show) => make("tr", {}, make("td", {}, label), ...[one, other].map(each => make("td", {}, show(of(each.entry)))), make("td", {}, signed(of(one.entry) - of(other.entry), show)))
  const used = (kinds, of) => kinds.filter(kind => of(one.entry, kind) > 0 || of(other.entry, kind) > 0)
  table("pair", [make("th", {}), ...[one, other].map(each => make("th", { scope: "col" }, make("code", {}, ...parts(each.entry.name)))), make("th", { scope: "col" }, say.difference)], [
    ...["step", ...used(ITEMS, at)].map(kind => row(termOf("time", kind), entry => at(entry, kind), value => value ? seconds(value) : "0 s")),
    row(say.speed, entry => entry.speed, grouped), row(say.mfu, entry => 100 * entry.mfu, value => `${value.toFixed(1)}%`),
    ...["reserved", ...used(KINDS, (entry, kind) => size(entry, kind))].map(kind => row(termOf("memory", kind), entry => size(entry, kind), bytes))])
  fill("nameParts", ...one.entry.name.split(".").map(part => make("li", {}, make("code", {}, part), ` ${meaning(part)}`)))
}

function drawFamilies(view) {
  if (!view.standing) return fill("kin")
  const best = view.rows[0]?.entry
  const head = ["family", "bestPlan", "step", "loss", "most", "reserved", "verdict"].map((name, index) => make("th", { scope: "col", class: index < 2 ? "left" : "" }, say[name]))
  const rows = view.kin.filter(row => row.entry !== best).map(({ family, entry, verdict }) => {
    const lost = best ? ITEMS.map(kind => [kind, at(entry, kind) - at(best, kind)]).sort((one, other) => other[1] - one[1])[0] : ["", 0]
    const fits = verdict !== "no"
    const choose = () => again({ plan: entry.name }, "#kin [aria-selected=true]")
    return make("tr", { tabindex: 0, onclick: choose, onkeydown: event => event.key === "Enter" && choose(), "aria-selected": String(view.selected.entry === entry) },
      make("td", {}, DATA.words[state.language].family[family]), make("td", { class: "left plan" }, ...planOf(entry)), make("td", {}, stepOf(at(entry, "step"))),
      make("td", {}, fits && best ? percent(at(entry, "step") / at(best, "step") - 1, true) : "\u2013"),
      make("td", {}, fits && lost[1] > 0 ? `${nameOf("time", lost[0])} +${seconds(lost[1])}` : "\u2013"),
      make("td", {}, bytes(size(entry, "reserved"))), make("td", { class: `left ${verdict}` }, say[verdict]))
  })
  return table("kin", head, rows)
}

function drawRejected(view) {
  const rows = (view.standing?.rejected || []).map(([reason, count, example]) => make("tr", {}, make("td", {}, DATA.words[state.language].reason[DATA.reasons[reason]]), make("td", {}, grouped(count)), make("td", { class: "left text" }, lineOf(view.point.examples[example]))))
  const head = ["reason", "count", "example"].map((name, index) => make("th", { scope: "col", class: index === 2 ? "left" : "" }, say[name]))
  table("refused", head, rows)
  fill("notes", view.selected ? (view.selected.entry.notes || []).map(lineOf).join(" ") : "")
}

// --- input -----------------------------------------------------------------------------------------------------------------------

async function copy() {
  const text = document.getElementById("words").textContent, button = document.getElementById("copy")
  try { await navigator.clipboard.writeText(text) } catch {
    getSelection().selectAllChildren(document.getElementById("words"))
    document.execCommand("copy")
  }
  button.textContent = say.copied
  setTimeout(() => { button.textContent = say.copy }, 1200)
}

function move(by) {
  const view = look()
  const now = view.sorted.findIndex(row => row.entry === view.selected?.entry)
  const next = view.sorted[Math.min(Math.max(now + by, 0), view.sorted.length - 1)]
  if (!next) return
  again({ plan: next.entry.name }, "#ranked [aria-selected=true]")
}

document.getElementById("copy").addEventListener("click", copy)
document.getElementById("sliders").addEventListener("submit", event => event.preventDefault())
begin({
  read: heard, tell, draw: drawAnswer,
  keys: { ArrowDown: () => move(1), ArrowUp: () => move(-1), 0: () => write({ stops: [...DATA.here], plan: null, with: null, pins: {}, sort: "" }), c: copy },
})
