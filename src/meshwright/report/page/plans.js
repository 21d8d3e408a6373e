// The state of this page: the positions of three sliders, the values of continuous inputs, the selected plan, the plan that it is compared with,
// pins, and the sort order.
const SLIDERS = ["devices", "batch", "sequence"]
// The inputs that vary, each with its range. Sliders are logarithmic and have STEPS steps. Batch and sequence have whole values (`stopsOf`).
const INPUTS = Object.fromEntries(Object.entries({ batch: DATA.batch, sequence: [DATA.lengths[0], DATA.points[0].sequence, DATA.lengths.at(-1)], ...DATA.inputs })
  .filter(([name, [low, , high]]) => high > low || !SLIDERS.includes(name)).map(([name, [low, own, high]]) => [name, { low, own, high }]))
const STEPS = 400
const ITEMS = TIME.filter(kind => kind !== "step"), KINDS = MEMORY.filter(kind => !["total", "driver", "reserved"].includes(kind))
const WAITING = ["tensor", "data", "pipeline", "context", "expert"]
const at = (entry, kind) => entry.time[TIME.indexOf(kind)]
const size = (entry, kind, row = entry.peak) => entry.memory[row][MEMORY.indexOf(kind)]
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
  const inputs = Object.fromEntries(Object.entries(INPUTS).map(([name, { low, own, high }]) => {
    const value = Math.min(Math.max(Number(given.get(name)) || own, low), high)
    return [name, SLIDERS.includes(name) ? Math.round(value) : value]
  }))
  const pins = Object.fromEntries(Object.keys(PINS).map(pin => [pin, given.get(pin) || ""]))
  return { stops, inputs, plan: given.get("plan"), with: given.get("with"), pins, sort: given.get("sort") || "" }
}

function tell(told) {
  SLIDERS.forEach((name, axis) => { if (state.stops[axis] !== DATA.here[axis]) told.set(name, DATA.axes[name][state.stops[axis]]) })
  for (const name of changedInputs()) told.set(name, state.inputs[name])
  if (state.plan) told.set("plan", state.plan)
  if (state.with) told.set("with", state.with)
  for (const [pin, value] of Object.entries(state.pins)) if (value) told.set(pin, value)
  if (state.sort) told.set("sort", state.sort)
}

const changedInputs = () => Object.keys(INPUTS).filter(name => state.inputs[name] !== INPUTS[name].own)

// Redraws the page after a change, and restores the focus, since the focused element was replaced.
function again(changes, where) {
  write(changes)
  document.querySelector(where).focus()
}

// --- the selected setting and plan -----------------------------------------------------------------------------------------------

// Returns a point, and its plans for the continuous inputs, best first.
function resultsAt([devices, batch, sequence], inputs) {
  const place = (devices * DATA.axes.batch.length + batch) * DATA.axes.sequence.length + sequence
  return { place, point: DATA.points[place], all: rankPlans(DATA.points[place], inputs) }
}

function look() {
  const [devices] = state.stops
  const { place, point, all } = resultsAt(state.stops, state.inputs)
  const isPinned = Object.values(state.pins).some(Boolean)
  const matching = all.filter(row => Object.entries(state.pins).every(([pin, value]) => !value || degree(row.plan, pin) === value))
  const rows = matching.filter(row => row.verdict !== "no").slice(0, SHOWN)
  const kin = DATA.families.flatMap(family => matching.find(row => row.family === family) || []).sort((one, other) => matching.indexOf(one) - matching.indexOf(other))
  const by = COLUMNS[state.sort.replace("-", "")], way = state.sort.startsWith("-") ? -1 : 1
  const sorted = by ? [...rows].sort((one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : 0) * way) : rows
  const selected = matching.find(row => row.name === state.plan) || rows[0] || kin[0]
  if (selected && rows.length && !rows.includes(selected) && selected.verdict !== "no") { rows.push(selected); if (sorted !== rows) sorted.push(selected) }
  return { place, point, rows, sorted, kin, all, isPinned, selected, cluster: DATA.clusters[devices] }
}

// Returns the anchor whose search is nearest to the inputs: at the job's own rates, with the nearest memory.
function nearestAnchor(point) {
  const work = anchor => Math.abs(Math.log(anchor.batch / (state.inputs.batch ?? anchor.batch))) + Math.abs(Math.log(anchor.sequence / (state.inputs.sequence ?? anchor.sequence)))
  const far = anchor => anchor.rates.some((rate, index) => rate !== DATA.rates[index]) ? Infinity : work(anchor) + Math.abs(Math.log(anchor.memory / state.inputs.memory))
  return point.anchors.reduce((best, anchor) => best && far(best) <= far(anchor) ? best : anchor, undefined)
}

// Quotes a word for a shell if necessary.
const quoted = word => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`

function command(view) {
  const [, batch, sequence] = SLIDERS.map((name, axis) => state.inputs[name] ?? DATA.axes[name][state.stops[axis]])
  const words = [...DATA.command], { memory } = state.inputs
  const own = memory === INPUTS.memory.own, limit = Number.isInteger(memory / GIB) ? `${memory / GIB}GiB` : String(memory)
  if (view.cluster !== null) words.push("--cluster", view.cluster)
  if (DATA.budget) words.push("--budget", limit)
  else if (!own) words.push("--set", `cluster.memory=${limit}`)
  for (const name of changedInputs()) if (RATES.includes(name)) words.push("--set", `cluster.rates.${name}=${state.inputs[name]}`)
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

const inputName = name => SLIDERS.includes(name) ? say[name] : name === "memory" && DATA.budget ? say.budgetSlider : say[`${name}Slider`]
const showInput = (name, value) => SLIDERS.includes(name) ? grouped(value) : name === "memory" ? round(value) : name === "efficiency" ? rate(DATA.hardware.flops * value, "FLOP/s") : rate(value, "B/s")
// The value at a step of a slider, a round number, and the step of a value. The job's own value is its own step.
const ownStep = name => stepOfValue(name, INPUTS[name].own)
function valueAt(name, step) {
  const { low, own, high } = INPUTS[name]
  if (SLIDERS.includes(name)) return stopsOf(name)[step]
  if (step === ownStep(name)) return own
  const value = low * (high / low) ** (step / STEPS), unit = name === "memory" ? value >= 8 * GIB ? GIB : GIB / 64 : 10 ** (Math.floor(Math.log10(value)) - 2)
  return Math.min(Math.max(Number((Math.round(value / unit) * unit).toPrecision(15)), low), high)
}
function stepOfValue(name, value) {
  if (!SLIDERS.includes(name)) return Math.round(STEPS * Math.log(value / INPUTS[name].low) / Math.log(INPUTS[name].high / INPUTS[name].low))
  const stops = stopsOf(name), next = stops.findIndex(stop => stop >= value)
  return next < 0 ? stops.length - 1 : next
}
const lastStep = name => SLIDERS.includes(name) ? stopsOf(name).length - 1 : STEPS

// Returns the values of the slider of batch or sequence: all batches that some plan of this number of devices divides.
function stopsOf(name) {
  if (name === "sequence") return DATA.lengths
  const point = DATA.points[state.stops[0]]
  if (!point.stops) {
    const { low, own, high } = INPUTS.batch, rules = [...new Map(point.plans.map(plan => [JSON.stringify(plan.rule), plan])).values()]
    point.stops = Array.from({ length: high - low + 1 }, (_, index) => low + index).filter(batch => batch === own || rules.some(plan => acceptsBatch(plan, batch)))
  }
  return point.stops
}

function drawSliders() {
  const form = document.getElementById("sliders"), varying = Object.keys(INPUTS).filter(name => INPUTS[name].high > INPUTS[name].low)
  const slider = (name, most, oninput) => make("div", {},
    make("label", { for: `slider-${name}` }, make("span", {}), make("output", { for: `slider-${name}` })),
    make("input", { type: "range", id: `slider-${name}`, min: 0, max: most, step: 1, oninput }), make("div", { class: "stops", "aria-hidden": "true" }))
  const stops = SLIDERS.filter(name => DATA.axes[name].length > 1)
  if (!form.children.length) {
    form.append(...stops.map(name => slider(name, DATA.axes[name].length - 1, event => write({ stops: state.stops.map((stop, axis) => SLIDERS[axis] === name ? Number(event.target.value) : stop) }))),
      ...varying.map(name => slider(name, lastStep(name), event => write({ inputs: { ...state.inputs, [name]: valueAt(name, Number(event.target.value)) } }))))
  }
  const show = (index, label, explain, value, at, marks, most) => {
    const [head, input, below] = form.children[index].children
    head.title = explain
    head.children[0].textContent = label
    head.children[1].textContent = value
    input.max = most
    input.value = at
    input.setAttribute("aria-valuetext", value)
    below.replaceChildren(...marks)
  }
  stops.forEach((name, index) => {
    const axis = SLIDERS.indexOf(name)
    show(index, say[name], say.explain.input[name], grouped(DATA.axes[name][state.stops[axis]]), state.stops[axis],
      DATA.axes[name].map((stop, at) => make(at === DATA.here[axis] ? "b" : "span", {}, grouped(stop))), DATA.axes[name].length - 1)
  })
  varying.forEach((name, index) => {
    const range = INPUTS[name], place = 100 * ownStep(name) / lastStep(name)
    show(stops.length + index, inputName(name), say.explain.input[name], showInput(name, state.inputs[name]), stepOfValue(name, state.inputs[name]), [
      make("span", {}, showInput(name, range.low)), make("b", { style: `left: ${place}%` }, range.own > range.low && range.own < range.high ? "\u25b4" : ""), make("span", {}, showInput(name, range.high))], lastStep(name))
  })
}

// Says whether a search for exactly these values found the first plan.
function assurance(view) {
  if (view.isPinned) {
    const pins = Object.entries(state.pins).filter(([, value]) => value).map(pin => pin.join("="))
    return pins.length === 1 && view.point.pins.includes(pins[0]) && !changedInputs().length ? say.pinsSearched : say.pinsNote
  }
  if (DATA.objective !== "fastest") return ""
  return isSearched(view.point, state.inputs, view.all[0].score) ? say.searched : say.notSearched
}

function drawChosen(view) {
  if (!view.rows.length && view.isPinned) return fill("chosen", make("p", {}, make("b", {}, say.noneShown), ` ${say.pinsNote}`))
  if (!view.rows.length) {
    const kin = view.kin[0]
    const why = lineOf(view.point.error) || (kin ? say.nearest(kin.entry.name, bytes(kin.entry.reserved), bytes(kin.limit)) : "")
    return fill("chosen", make("p", {}, make("b", { class: "no" }, say.none), ` ${why}`))
  }
  const { entry, verdict } = view.rows[0]
  return fill("chosen", fact(view.isPinned ? say.pinned : say.chosen, make("span", {}, ...parts(entry.name)), "name"), fact(say.step, stepOf(at(entry, "step"))), fact(say.speed, grouped(entry.speed)),
    fact(say.mfu, `${(100 * entry.mfu).toFixed(1)}%`), fact(say.reserved, `${bytes(entry.reserved)} ${say.of} ${bytes(limitOf(view.rows[0]))}`), fact("\u00a0", say[verdict], verdict), make("p", { class: "note" }, assurance(view)))
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
    const { entry, verdict } = row, step = at(entry, "step"), limit = limitOf(row)
    const chosen = entry === view.selected.entry
    return make("tr", { tabindex: chosen ? 0 : -1, "aria-selected": String(chosen), "data-plan": entry.name, onclick: () => write({ plan: entry.name }) },
      make("td", { class: "plan" }, ...planOf(entry)), cell(stepOf(step)), make("td", { class: "bars" }, timeBar(entry, slowest)), cell(grouped(entry.speed)), cell(`${(100 * entry.mfu).toFixed(1)}%`),
      cell(bytes(size(entry, "reserved"))), make("td", { class: "bars" }, memoryBar(entry, entry.peak, limit)), make("td", { class: `left ${verdict}` }, say[verdict]),
      cell(percent((limit - size(entry, "reserved")) / limit)), cell(percent(at(entry, "bubble") / step)), cell(percent(exposed(entry) / step)))
  })
  table("ranked", heads, rows)
  fill("order", say[DATA.objective])
  fill("missing", [...view.rows, ...view.kin].some(row => row.entry.missing) ? say.missingNote : "")
}

// The inputs whose tables are open.
const OPEN = new Set([SLIDERS.find(name => DATA.axes[name].length > 1) || "memory"])

// For each input, a table and a plot of the best plan at several of its values, while the other inputs stay.
function drawChanges() {
  const best = (stops, inputs) => resultsAt(stops, inputs).all.find(row => row.verdict !== "no")
  const discrete = SLIDERS.map((name, axis) => ({
    name, label: say[name], show: grouped, now: state.stops[axis],
    values: DATA.axes[name].map((value, index) => ({ value, at: index, changes: { stops: state.stops.map((own, other) => other === axis ? index : own) } })),
  }))
  const continuous = Object.entries(INPUTS).filter(([, { low, high }]) => high > low).map(([name, { low, own, high }]) => {
    const even = SLIDERS.includes(name) ? [0.25, 0.5, 1, 2, 4].map(factor => valueAt(name, stepOfValue(name, own * factor)))
      : Array.from({ length: VALUES_OF_INPUT }, (_, index) => valueAt(name, Math.round(index * STEPS / (VALUES_OF_INPUT - 1))))
    const values = [...new Set([...even, own, state.inputs[name]])].sort((one, other) => one - other)
    return { name, label: inputName(name), show: value => showInput(name, value), now: Math.log(state.inputs[name]), values: values.map(value => ({ value, at: Math.log(value), changes: { inputs: { ...state.inputs, [name]: value } } })) }
  })
  fill("changed", ...[...discrete, ...continuous].flatMap(({ name, label, show, now, values }) => {
    if (values.length < 2) return []
    const details = make("details", { open: OPEN.has(name) && "", ontoggle: () => { if (details.open !== OPEN.has(name)) { OPEN[details.open ? "add" : "delete"](name); drawChanges(); document.querySelector(`[data-input=${name}]`).focus() } } }, make("summary", { "data-input": name }, label))
    if (!details.open) return [details]
    const found = values.map(each => {
      const row = best(each.changes.stops || state.stops, each.changes.inputs || state.inputs)
      return { ...each, entry: row?.entry, verdict: row?.verdict || "no" }
    })
    const fitting = found.filter(row => row.entry)
    if (!fitting.length) return [details]
    const linear = row => name === "devices" ? fitting[0].entry.speed * row.value / fitting[0].value : 0
    const { svg, x, y } = axes(0, Math.max(...fitting.map(row => Math.max(row.entry.speed, linear(row)))), [found[0].at, found.at(-1).at], grouped, show, { marks: found.map(row => [row.at, row.value]) })
    svg.append(make("title", {}, `${say.speed}, ${label}`))
    if (name === "devices") svg.append(make("path", { class: "expected", d: pathOf(fitting.map(row => [row.at, linear(row)]), x, y) }, make("title", {}, say.linear)))
    svg.append(make("path", { class: "curve k-compute", d: pathOf(fitting.map(row => [row.at, row.entry.speed]), x, y) }))
    svg.append(...fitting.map(row => make("circle", { class: "k-compute", cx: x(row.at), cy: y(row.entry.speed), r: row.at === now ? 6 : 3.5 }, make("title", {}, `${show(row.value)}: ${grouped(row.entry.speed)}, ${row.entry.name}`))))
    const heads = [label, say.plan, say.step, say.speed, ...(name === "devices" ? [say.scaling] : []), say.mfu, say.reserved, ""].map((head, index) => make("th", { scope: "col", class: index === 1 ? "left" : "" }, head))
    const rows = found.map(row => {
      const { entry } = row
      const cells = entry ? [stepOf(at(entry, "step")), grouped(entry.speed), ...(name === "devices" ? [percent(entry.speed / linear(row))] : []), `${(100 * entry.mfu).toFixed(1)}%`, bytes(entry.reserved)] : heads.slice(3).map(() => "\u2013")
      return make("tr", { "aria-selected": String(row.at === now), onclick: () => write(row.changes) },
        make("td", {}, show(row.value)), make("td", { class: "left plan" }, ...(entry ? planOf(entry) : [])), ...cells.map(value => make("td", {}, value)), make("td", { class: `left ${row.verdict}` }, say[row.verdict]))
    })
    details.append(make("div", { class: "scroll" }, make("table", { id: `changed-${name}` }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))), make("div", { class: "scroll" }, svg))
    return [details]
  }))
}

// Returns what a part of a plan's name means.
function meaning(part) {
  const [pattern, words] = Object.values(say.parts).find(([pattern]) => new RegExp(`^(?:${pattern})$`).test(part)) || ["", ""]
  return pattern && part.replace(new RegExp(`^(?:${pattern})$`), words)
}

const parts = name => name.split(/(?<=\.)/).flatMap(part => [make("span", { class: "part", title: meaning(part.replace(".", "")) }, part), make("wbr")])
const SHOWN = 8, VALUES_OF_INPUT = 5, COMPARED = 40
const termOf = (group, kind) => make("span", { class: "term", title: say.explain[group][kind] }, nameOf(group, kind))
const planOf = entry => [make("code", {}, ...parts(entry.name)), ...(entry.missing ? [make("small", { title: say.missing(entry.missing) }, "\u25cb")] : [])]
const timeBar = (entry, whole) => bar(ITEMS.map(kind => [kind, at(entry, kind), `${nameOf("time", kind)} ${seconds(at(entry, kind))}: ${say.explain.time[kind]}`]), whole)
// Returns the usable memory of a rank, by default of the peak-memory rank. On heterogeneous devices, ranks have different limits.
const limitOf = ({ entry, limit }, rank = entry.peak) => entry.limits?.length ? entry.limits[rank] : limit

const memoryBar = (entry, row, limit, whole = limit) => bar(KINDS.map(kind => [kind, size(entry, kind, row), `${nameOf("memory", kind)} ${bytes(size(entry, kind, row))}`]), whole, limit)

function drawMemory(view) {
  if (!view.selected) { fill("memoryBars"); return fill("rankBars") }
  const { entry } = view.selected, limit = limitOf(view.selected)
  const most = Math.max(limit, size(entry, "total"))
  const kinds = KINDS.flatMap(kind => [termOf("memory", kind), bar([[kind, size(entry, kind), ""]], most), make("span", { class: "end" }, bytes(size(entry, kind))), make("span", { class: "end quiet" }, percent(size(entry, kind) / limit))])
  const sums = ["total", "driver", "reserved"].flatMap(kind => [make("b", {}, termOf("memory", kind)), kind === "total" ? memoryBar(entry, entry.peak, limit, most) : make("span", {}), make("b", { class: "end" }, bytes(size(entry, kind))), make("span", { class: "end quiet" }, percent(size(entry, kind) / limit))])
  fill("memoryBars", make("div", { class: "rows" }, ...kinds, make("div", { class: "rule" }), ...sums))
  const limits = entry.ranks.map((_, row) => limitOf(view.selected, row))
  const whole = Math.max(...limits, ...entry.ranks.map((_, row) => size(entry, "total", row))) * 1.005
  const stages = entry.ranks.flatMap((rank, row) => [make("span", { class: "quiet" }, `${say.rank} ${rank}`), memoryBar(entry, row, limitOf(view.selected, row), whole), make("span", { class: "end" }, bytes(size(entry, "total", row)))])
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
  const isOwnWork = !changedInputs().some(name => SLIDERS.includes(name))
  const chart = view.selected && isOwnWork && DATA.charts[`${view.place} ${view.selected.entry.name}`]
  if (!chart) return fill("chart", make("p", { class: "note" }, view.selected ? say.noChart : ""))
  const isOwn = changedInputs().every(name => !RATES.includes(name))
  const caption = say.chartCaption(chart.count, chart.of, seconds(chart.seconds)) + say.chartRanks(chart.ranks.length, view.selected.entry.of) + (isOwn ? "" : say.ownRates)
  const kinds = ["F", "B", "W"].filter((_, kind) => chart.rows.some(row => row.some((number, i) => i % 5 === 0 && number === kind)))
  const key = legend(...kinds.map(kind => [kind, say[kind]]))
  key.append(make("span", { class: "idle" }, say.idle))
  return fill("chart", make("div", { class: "scroll" }, gantt(chart, { ...say, title: caption })), key, make("p", { class: "note" }, caption))
}

// Draws the menus of the degrees that a plan may have. Their values are those of the plans of this setting.
function drawPins(view) {
  const menus = Object.keys(PINS).map(pin => {
    const values = [...new Set([...view.point.plans.map(plan => degree(plan, pin)), state.pins[pin]].filter(Boolean))].sort((one, other) => one - other)
    const option = value => make("option", { value, selected: state.pins[pin] === value && "" }, value || say.any)
    return make("label", {}, pin === "zero" ? "ZeRO" : pin, make("select", { id: `pin-${pin}`, onchange: event => again({ pins: { ...state.pins, [pin]: event.target.value } }, `#pin-${pin}`) }, ...["", ...values].map(option)))
  })
  fill("pins", make("span", {}, say.pins), ...menus)
}

// Shows why the selected plan is not the first one, and both plans term by term. Without another choice it is compared with the first one.
function drawCompare(view) {
  const one = view.selected, among = view.all.filter(row => row !== one)
  const other = among.find(row => row.name === state.with) || among[0]
  const others = [...new Set([...among.slice(0, COMPARED), ...view.kin.filter(row => row !== one), other])].filter(Boolean)
  document.getElementById("compare").hidden = !one || !other
  if (!one || !other) return
  const isFirst = one.entry === view.all[0].entry
  fill("whyNot", isFirst ? say.compare : say.whyNot(one.entry.name))
  const more = at(one.entry, "step") / at(other.entry, "step") - 1
  const terms = ITEMS.map(kind => [kind, at(one.entry, kind) - at(other.entry, kind)]).filter(([, lost]) => lost > 0.001 * at(other.entry, "step")).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, lost]) => `${nameOf("time", kind)} +${seconds(lost)}`).join(", ")
  const limit = limitOf(one)
  const lines = [one.verdict === "no" && say.tooLarge(one.entry.name, bytes(size(one.entry, "reserved")), bytes(limit)), Math.abs(more) < 0.0005 ? say.equal(one.entry.name, other.entry.name) : more >= 0 ? say.slower(one.entry.name, other.entry.name, percent(more, true).replace("+", ""), terms) : say.faster(one.entry.name, other.entry.name, percent(-more, true).replace("+", "")), one.verdict === "tight" && say.isTight(one.entry.name), one.entry.risk > 1 && say.isUnmeasured(one.entry.name)]
  fill("reason", lines.filter(Boolean).join(" "))
  const select = document.getElementById("other")
  select.replaceChildren(...others.map(row => make("option", { value: row.entry.name, selected: row === other && "" }, row.entry.name)))
  select.onchange = () => write({ with: select.value })
  const signed = (value, show) => show(Math.abs(value)) === show(0) ? "" : `${value > 0 ? "+" : "\u2212"}${show(Math.abs(value))}`
  const row = (label, of, show) => make("tr", {}, make("td", {}, label), ...[one, other].map(each => make("td", {}, show(of(each.entry)))), make("td", {}, signed(of(one.entry) - of(other.entry), show)))
  const used = (kinds, of) => kinds.filter(kind => of(one.entry, kind) > 0 || of(other.entry, kind) > 0)
  table("pair", [make("th", {}), ...[one, other].map(each => make("th", { scope: "col" }, make("code", {}, ...parts(each.entry.name)))), make("th", { scope: "col" }, say.difference)], [
    ...["step", ...used(ITEMS, at)].map(kind => row(termOf("time", kind), entry => at(entry, kind), value => value ? seconds(value) : "0 s")),
    row(say.speed, entry => entry.speed, grouped), row(say.mfu, entry => 100 * entry.mfu, value => `${value.toFixed(1)}%`),
    ...["reserved", ...used(KINDS, (entry, kind) => size(entry, kind))].map(kind => row(termOf("memory", kind), entry => size(entry, kind), bytes))])
  fill("nameParts", ...one.entry.name.split(".").map(part => make("li", {}, make("code", {}, part), ` ${meaning(part)}`)))
}

function drawFamilies(view) {
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
  const anchor = nearestAnchor(view.point)
  const rows = (anchor?.rejected || []).map(([reason, count, example]) => make("tr", {}, make("td", {}, DATA.words[state.language].reason[DATA.reasons[reason]]), make("td", {}, grouped(count)), make("td", { class: "left text" }, lineOf(view.point.examples[example]))))
  const head = ["reason", "count", "example"].map((name, index) => make("th", { scope: "col", class: index === 2 ? "left" : "" }, say[name]))
  table("refused", head, rows)
  fill("searched", anchor && changedInputs().length ? say.searchedAt(round(anchor.memory), grouped(anchor.batch), grouped(anchor.sequence)) : "")
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
  keys: { ArrowDown: () => move(1), ArrowUp: () => move(-1), 0: () => write({ ...heard(new URLSearchParams()) }), c: copy },
})
