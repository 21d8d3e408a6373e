// Formats bytes, counts and seconds by the same rules as the text output.
function shown(value, step, units) {
  let index = 0
  while (Math.abs(value) >= step * 0.9995 && index < units.length - 1) { value /= step; index += 1 }
  const digits = index === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2
  return `${value.toFixed(digits)} ${units[index]}`.trim()
}

const bytes = value => shown(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
// Formats a rate with three significant digits.
function rate(value, unit) {
  const power = Math.min(Math.max(Math.floor(Math.log10(value * 1.0005) / 3), 0), 5)
  return `${Number((value / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}${unit}`
}
const parameters = value => shown(value, 1000, ["", "k", "M", "B", "T"])
const grouped = value => value.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",")
const round = value => Number.isInteger(value / 2 ** 30) ? `${value / 2 ** 30} GiB` : bytes(value)

function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor(value % 3600 / 60)} min`
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (value >= factor * 0.9995 || unit === "us") {
      const number = value / factor
      return `${number.toFixed(number < 10 ? 2 : 1)} ${unit}`
    }
  }
}

// Formats the time of a step for a table. From 60 s to less than 1000 s, it is in seconds with one decimal.
const stepOf = value => value >= 60 && value < 1000 ? `${value.toFixed(1)} s` : seconds(value)

// Formats a fraction as a percentage. `signed`: whether it is a difference; it then has a sign, and one decimal below 10 %.
function percent(value, signed = false) {
  const digits = signed && Math.abs(value) < 0.0995 ? 1 : 0
  return `${signed && value >= 0 ? "+" : ""}${(100 * value).toFixed(digits)}%`
}
