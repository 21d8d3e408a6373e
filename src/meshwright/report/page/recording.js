// The page of a recording: what was compared with one device, and the first difference with its likely cause.
const small = value => value === null ? "\u2013" : value.toExponential(1)
const cells = (words, left = []) => make("tr", {}, ...words.map((word, index) => make("td", { class: left.includes(index) ? "left text" : "" }, String(word))))
const heads = (names, left = []) => names.map((name, index) => make("th", { scope: "col", class: left.includes(index) ? "left" : "" }, say[name]))

function drawFacts() {
  const versions = Object.entries(DATA.versions).map(([name, version]) => `${name} ${version}`).join(", ")
  fill("chosen", fact(say.result, DATA.equal ? say.equal : say.differs, "name"), fact(say.engine, DATA.engine), fact(say.ranks, String(DATA.world)),
    fact(say.replicas, String(DATA.replicas)), fact(say.stages, String(DATA.stages)), fact(say.precision, DATA.precision), fact(say.versions, versions))
}

function drawFindings() {
  document.getElementById("findings").hidden = DATA.equal
  table("findingRows", heads(["step", "what", "module", "ranks", "amount", "limit", "cause", "why"], [2, 6, 7]), DATA.findings.map(row => cells(
    [row.step, row.kind, row.module || say.whole, row.ranks.join(", "), small(row.amount), small(row.limit), row.cause, lineOf(row.why)], [2, 6, 7])))
}

function drawSteps() {
  const value = (number, digits) => number === null ? "\u2013" : number.toPrecision(digits)
  table("stepRows", heads(["step", "microBatches", "loss", "recordedLoss", "labels", "recordedLabels", "outputs", "output", "norm", "gradients", "gradient", "at", "updates", "update"], [11]), DATA.steps.map(row => cells(
    [row.step, row.micro_batches, value(row.loss, 7), value(row.recorded_loss, 7), row.labels, row.recorded_labels === null ? "\u2013" : row.recorded_labels, row.outputs, small(row.output),
      value(row.norm, 4), row.gradients, small(row.gradient), row.gradient_at || "\u2013", row.updates, row.updates ? small(row.update) : "\u2013"], [11])))
}

function drawRecording() {
  fill("title", [DATA.model, DATA.engine].join(" \u00b7 "))
  fill("subtitle", DATA.equal ? say.equalLine : say.differsLine)
  drawFacts()
  drawFindings()
  drawSteps()
  document.getElementById("notes").hidden = !DATA.notes.length
  table("noteRows", [], DATA.notes.map(note => cells([lineOf(note)], [0])))
  fill("made", say.made(DATA.version, DATA.folder))
}

begin({ draw: drawRecording })
