// The plans of a point for any device memory and rates of the cluster. Times are results of the program that the planner recorded from its
// cost model; the rules of fit and score are those of the search. This file uses DATA only, so that tests can run it without a browser.
const TIME = DATA.keys.time, MEMORY = DATA.keys.memory
const RATES = DATA.keys.rates
const GIB = 2 ** 30

// The operations of the program, as [function, operands]. An operand is the index of a value, or -1 - i for constant i.
const FUNCTIONS = {
  add: (a, b) => a + b, subtract: (a, b) => a - b, multiply: (a, b) => a * b, true_divide: (a, b) => a / b,
  maximum: Math.max, minimum: Math.min, sqrt: Math.sqrt, greater: (a, b) => a > b, where: (a, b, c) => a ? b : c,
}
const PROGRAM = (() => {
  const { operations, code, constants } = DATA.program, found = []
  for (let at = 0; at < code.length;) {
    const name = operations[code[at]], operands = FUNCTIONS[name].length || 2
    found.push([FUNCTIONS[name], code.slice(at + 1, at + 1 + operands)])
    at += 1 + operands
  }
  const first = RATES.length, values = new Array(first + found.length)
  return { found, first, constants, values, value: operand => operand < 0 ? constants[-1 - operand] : values[operand] }
})()

for (const point of DATA.points) point.plans = point.plans.map(row => Object.fromEntries(DATA.keys.entry.map((key, index) => [key, row[index]])))

// Returns the indices of the operations that the times of a point need, in order.
function operationsOf(point) {
  if (point.operations) return point.operations
  const needed = new Uint8Array(PROGRAM.first + PROGRAM.found.length), found = []
  for (const plan of point.plans) for (const operand of plan.time) if (operand >= 0) needed[operand] = 1
  for (let at = PROGRAM.found.length - 1; at >= 0; at--) {
    if (!needed[PROGRAM.first + at]) continue
    found.push(at)
    for (const operand of PROGRAM.found[at][1]) if (operand >= 0) needed[operand] = 1
  }
  return point.operations = found.reverse()
}

// Returns the rates of the inputs, those of the job where the inputs name none.
const ratesOf = inputs => RATES.map((name, index) => inputs[name] ?? DATA.rates[index])

// Returns the usable memory of a device with the memory or the budget `memory`: the limit of the expected bytes, and of those with a margin.
const limitsOf = memory => DATA.budget ? [Math.min(memory, DATA.hardware.physical), DATA.hardware.physical] : [memory * DATA.hardware.usable, memory * DATA.hardware.usable]

// Returns the score of a plan, rounded as in the search, so that the simpler of equally good plans is first.
function scoreOf(entry, verdict) {
  const value = DATA.objective === "headroom" ? entry.reserved : (entry.time[TIME.indexOf("step")] + entry.first) * entry.risk * (verdict === "tight" ? DATA.hardware.tight : 1)
  return Number(value.toPrecision(10))
}

// Returns all plans of a point with their numbers for the inputs: those that fit first, best first.
function rankPlans(point, inputs) {
  const rates = ratesOf(inputs), { found, first, values, value } = PROGRAM
  rates.forEach((rate, index) => { values[index] = rate })
  for (const at of operationsOf(point)) {
    const [of, operands] = found[at]
    values[first + at] = operands.length === 2 ? of(value(operands[0]), value(operands[1])) : of(...operands.map(value))
  }
  const [limit, ample] = limitsOf(inputs.memory)
  const rows = point.plans.map(plan => {
    const time = plan.time.map(value), step = time[TIME.indexOf("step")], reserved = plan.memory[plan.peak][MEMORY.indexOf("reserved")]
    const entry = { ...plan, time, reserved, speed: point.tokens / step, mfu: point.flops / step, first: plan.first || 0 }
    const verdict = plan.verdict || (!plan.risk || reserved > limit ? "no" : plan.safe <= ample ? "fits" : "tight")
    return { entry, verdict, score: scoreOf(entry, verdict), family: DATA.families[plan.family], limit }
  })
  const worth = row => row.verdict === "no" ? Infinity : row.score
  return rows.sort((one, other) => worth(one) - worth(other) || (worth(one) === Infinity ? one.entry.reserved - other.entry.reserved : 0))
}

// Returns whether `score` is the best score of a search of all plans for exactly these inputs.
function isSearched(point, inputs, score) {
  const rates = ratesOf(inputs)
  const anchor = point.anchors.find(each => each.memory === inputs.memory && each.rates.every((rate, index) => rate === rates[index]))
  return Boolean(anchor?.score) && Math.abs(score / anchor.score - 1) < 1e-6
}
