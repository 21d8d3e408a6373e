// The plans of a point for any batch, sequence, device memory and rates of the cluster. Times and bytes are results of the program that the
// planner recorded from its cost model; the rules of fit and score are those of the search. This file uses DATA only, so that tests can run it
// without a browser.
const TIME = DATA.keys.time, MEMORY = DATA.keys.memory
const RATES = DATA.keys.rates
const GIB = 2 ** 30
const [PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, HOST, RESERVED] = [0, 1, 2, 3, 4, 5, 6]

// The operations of the program in order. `starts` has the index in `code` of each operation, which precedes its operands. An operand is the
// index of a value, or -1 - i for constant i. `values` has the constants first, so an operand `at` is the value `constants + at`.
const PROGRAM = (() => {
  const { operations, code, constants } = DATA.program, starts = [], inputs = RATES.length + 3
  const operands = operations.map(name => name === "where" ? 3 : ["sqrt", "ceil"].includes(name) ? 1 : 2)
  for (let at = 0; at < code.length; at += 1 + operands[code[at]]) starts.push(at)
  const values = new Float64Array(constants.length + inputs + starts.length)
  constants.forEach((number, index) => { values[constants.length - 1 - index] = number })
  return { code: Int32Array.from(code), starts, operands, inputs, values, zero: constants.length }
})()
const valueOf = operand => PROGRAM.values[PROGRAM.zero + operand]
const [SEQUENCE_AT, TOKENS_AT, COUNT_AT] = [0, 1, 2].map(index => RATES.length + index)

// Computes the operations of a list of indices. The cases have the order of OPERATIONS in planner/cost/symbolic.py.
function compute(indices) {
  const { code, starts, inputs, values, zero } = PROGRAM
  for (const index of indices) {
    const at = starts[index], a = values[zero + code[at + 1]], b = values[zero + code[at + 2]]
    let found
    switch (code[at]) {
      case 0: found = a + b; break
      case 1: found = a - b; break
      case 2: found = a * b; break
      case 3: found = a / b; break
      case 4: found = a > b ? a : b; break
      case 5: found = a < b ? a : b; break
      case 6: found = Math.sqrt(a); break
      case 7: found = a > b ? 1 : 0; break
      case 8: found = a ? b : values[zero + code[at + 3]]; break
      case 9: found = Math.ceil(a); break
      case 10: found = Math.floor(a / b); break
      case 11: found = a >= b ? 1 : 0; break
      case 12: found = a === b ? 1 : 0; break
    }
    values[zero + inputs + index] = found
  }
}

for (const point of DATA.points) point.plans = point.plans.map(row => Object.fromEntries(DATA.keys.entry.map((key, index) => [key, row[index]])))
for (const point of DATA.points) point.plans.forEach((plan, place) => { plan.place = place })
for (const point of DATA.points) for (const plan of point.plans) plan.rule = plan.rule?.length ? Object.fromEntries(DATA.keys.rule.map((key, index) => [key, plan.rule[index]])) : null

// Returns the indices of the operations that some plans need, in order: those without tokens and counts, those of tokens, and the others.
function operationsOf(plans) {
  const { code, starts, operands, inputs } = PROGRAM
  const needed = new Uint8Array(inputs + starts.length), kinds = new Uint8Array(inputs + starts.length), found = [[], [], []]
  for (const plan of plans) for (const row of [plan.time, ...plan.memory]) for (const operand of row) if (operand >= 0) needed[operand] = 1
  const each = (index, act) => { for (let i = 1; i <= operands[code[starts[index]]]; i++) if (code[starts[index] + i] >= 0) act(code[starts[index] + i]) }
  for (let at = starts.length - 1; at >= 0; at--) if (needed[inputs + at]) each(at, operand => { needed[operand] = 1 })
  kinds[TOKENS_AT] = 1
  kinds[COUNT_AT] = 2
  starts.forEach((_, at) => {
    each(at, operand => { kinds[inputs + at] = Math.max(kinds[inputs + at], kinds[operand]) })
    if (needed[inputs + at]) found[kinds[inputs + at]].push(at)
  })
  return found
}

// Returns the plans of a point that share their operations: those with equal data-parallel and context-parallel degrees.
function groupsOf(point) {
  if (point.groups) return point.groups
  const groups = new Map()
  for (const plan of point.plans) {
    const key = plan.rule ? `${plan.rule.rows} ${plan.rule.cp}` : ""
    groups.set(key, [...(groups.get(key) || []), plan])
  }
  return point.groups = [...groups.values()].map(plans => ({ plans, operations: operationsOf(plans) }))
}

const DIVISORS = new Map()
// Returns the divisors of a number in ascending order.
function divisorsOf(number) {
  if (DIVISORS.size > 500) DIVISORS.clear()
  if (!DIVISORS.has(number)) {
    const low = []
    for (let each = 1; each * each <= number; each++) if (number % each === 0) low.push(each)
    DIVISORS.set(number, [...new Set([...low, ...low.map(each => number / each).reverse()])])
  }
  return DIVISORS.get(number)
}

// Returns whether a plan can run this number of micro-batches.
const acceptsCount = ({ multiple, least, ordered }, count) => count % multiple === 0 && count >= least && (!ordered || count === ordered)

// Returns whether a plan can run a batch with some micro-batch size.
function acceptsBatch({ rule }, batch) {
  const rows = rule && rule.rows * (DATA.microBatch || 1)
  return Boolean(rule) && batch % rows === 0 && (rule.ordered ? batch / rows % rule.ordered === 0 : acceptsCount(rule, batch / rows))
}

// Returns the rates of the inputs, those of the job where the inputs name none.
const ratesOf = inputs => RATES.map((name, index) => inputs[name] ?? DATA.rates[index])
const workOf = (point, inputs) => [inputs.batch ?? point.batch, inputs.sequence ?? point.sequence]

// Returns the usable memory of a device with the memory or the budget `memory`: the limit of the expected bytes, and of those with a margin.
const limitsOf = memory => DATA.budget ? [Math.min(memory, DATA.hardware.physical), DATA.hardware.physical] : [memory * DATA.hardware.usable, memory * DATA.hardware.usable]

const STEP_AT = TIME.indexOf("step")

// A plan with one micro-batch size. It is created after the operations for its micro-batches, and stores their results.
class Row {
  constructor(plan, size, point, [batch, sequence], limits) {
    const { overhead: [expected, safe], host, tight } = DATA.hardware, driver = plan.driver || 0
    Object.assign(this, { plan, size, point, batch, sequence, limit: limits[0], family: DATA.families[plan.family], time: plan.time.map(valueOf), bytes: plan.memory.map(row => row.map(valueOf)) })
    this.totals = this.bytes.map(each => each[PARAMETERS] + each[GRADIENTS] + each[OPTIMIZER] + each[ACTIVATIONS] + each[BUFFERS])
    this.most = this.totals.reduce((peak, total, index) => total > this.totals[peak] ? index : peak, 0)
    const total = this.totals[this.most], isCrowded = this.bytes.some(each => each[HOST] > host)
    this.reserved = this.bytes[this.most][RESERVED] ?? total * expected + driver
    this.verdict = plan.verdict || (!plan.risk || isCrowded || this.reserved > limits[0] ? "no" : total * safe + driver <= limits[1] ? "fits" : "tight")
    // The score is rounded as in the search, so that the simpler of equally good plans is first.
    const score = DATA.objective === "headroom" ? this.reserved : (this.time[STEP_AT] + (plan.first || 0)) * plan.risk * (this.verdict === "tight" ? tight : 1)
    this.score = Number(score.toPrecision(10))
  }

  get name() { return this.size ? this.plan.name.replace(/(^|\.)mb\d+/, `$1mb${this.size}`) : this.plan.name }

  // Returns the plan with all numbers that the page shows.
  get entry() {
    if (this.shown) return this.shown
    const { plan, point, batch, sequence, bytes, totals, time, most } = this, expected = DATA.hardware.overhead[0], driver = plan.driver || 0, peakRank = plan.members.indexOf(most)
    const ranks = plan.ranks.includes(peakRank) ? plan.ranks : [...plan.ranks, peakRank].sort((one, other) => one - other)
    const memory = ranks.map(rank => plan.members[rank]).map(at => [...bytes[at].slice(0, HOST), totals[at], driver, bytes[at][RESERVED] ?? totals[at] * expected + driver])
    return this.shown = {
      ...plan, name: this.name, time, reserved: this.reserved, ranks, peak: ranks.indexOf(peakRank), memory, limits: plan.limits?.length ? ranks.map(rank => plan.limits[rank]) : [],
      speed: batch * sequence / time[STEP_AT], mfu: (point.flops[0] + point.flops[1] * sequence) * batch * sequence / time[STEP_AT], first: plan.first || 0,
    }
  }
}

// Returns all plans of a point with their numbers for the inputs: those that fit first, best first.
function rankPlans(point, inputs) {
  const { values, zero } = PROGRAM, work = workOf(point, inputs), [batch, sequence] = work, limits = limitsOf(inputs.memory), found = []
  ratesOf(inputs).forEach((rate, index) => { values[zero + index] = rate })
  values[zero + SEQUENCE_AT] = sequence
  for (const { plans, operations } of groupsOf(point)) {
    if (!plans[0].rule) {
      if (batch === point.batch && sequence === point.sequence) for (const plan of plans) found.push(new Row(plan, 0, point, work, limits))
      continue
    }
    const { rows: replicas, cp } = plans[0].rule
    if (batch % replicas) continue
    compute(operations[0])
    for (const size of DATA.microBatch ? [DATA.microBatch] : divisorsOf(batch / replicas)) {
      const count = batch / replicas / size
      const legal = plans.filter(({ rule }) => Number.isInteger(count) && acceptsCount(rule, count) && sequence % rule.divisor === 0)
      if (!legal.length) continue
      values[zero + TOKENS_AT] = size * sequence / cp
      values[zero + COUNT_AT] = count
      compute(operations[1])
      compute(operations[2])
      for (const plan of legal) found.push(new Row(plan, size, point, work, limits))
    }
  }
  const worth = row => row.verdict === "no" ? Infinity : row.score
  return found.sort((one, other) => {
    const [a, b] = [worth(one), worth(other)], more = a === b ? a === Infinity ? one.reserved - other.reserved : 0 : a - b
    return more || one.plan.place - other.plan.place || one.size - other.size
  })
}

// Returns whether `score` is the best score of a search of all plans for exactly these inputs.
function isSearched(point, inputs, score) {
  const rates = ratesOf(inputs), [batch, sequence] = workOf(point, inputs)
  const anchor = point.anchors.find(each => each.memory === inputs.memory && each.batch === batch && each.sequence === sequence && each.rates.every((rate, index) => rate === rates[index]))
  return Boolean(anchor?.score) && Math.abs(score / anchor.score - 1) < 1e-6
}
