// The part that all pages share: the data, and the language and the theme, which the URL fragment stores. A page passes its own functions to `begin`:
// `read` returns its state from the URL fragment, `tell` adds its state to the fragment, `draw` shows it, `keys` maps keys to actions.
const DATA = JSON.parse(document.getElementById("data").textContent)
const THEMES = { auto: "dark", dark: "light", light: "auto" }
const DARK = matchMedia("(prefers-color-scheme: dark)")

let page, state, say, said

function read() {
  const given = new URLSearchParams(location.hash.slice(1)), language = given.get("lang"), theme = given.get("theme")
  return { ...page.read(given), language: Object.hasOwn(WORDS, language) ? language : DATA.language, theme: Object.hasOwn(THEMES, theme) ? theme : "auto" }
}

function write(changes) {
  Object.assign(state, changes)
  const told = new URLSearchParams()
  page.tell(told)
  if (state.language !== DATA.language) told.set("lang", state.language)
  if (state.theme !== "auto") told.set("theme", state.theme)
  const address = `#${told}`
  if (address !== (location.hash || "#")) history.replaceState(null, "", address)
  draw()
}

function draw() {
  say = WORDS[state.language]
  fitCharts()
  const dark = state.theme === "dark" || (state.theme === "auto" && DARK.matches && !matchMedia("print").matches), root = document.documentElement
  root.dataset.theme = dark ? "dark" : "light"
  if (said !== say) {
    said = say
    root.lang = state.language
    for (const element of document.querySelectorAll("[data-say]")) {
      if (element.dataset.say === "keys") element.innerHTML = say.keys
      else element.textContent = say[element.dataset.say]
    }
    fill("language", say.other)
  }
  fill("theme", say[state.theme])
  page.draw()
}

const nameOf = (group, kind) => DATA.words[state.language][group][kind]
const lineOf = line => DATA.lines[state.language][line] ?? line
const turnTheme = () => write({ theme: THEMES[state.theme] })
const turnLanguage = () => write({ language: state.language === "en" ? "zh" : "en" })

function begin(own) {
  page = { read: () => ({}), tell: () => {}, ...own }
  const actions = { ...page.keys, l: turnLanguage, t: turnTheme }
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(actions, event.key)) return
    if (event.target.matches("select")) return
    if (event.target.matches("input") && event.key.startsWith("Arrow")) return
    event.preventDefault()
    actions[event.key]()
  })
  addEventListener("hashchange", () => { state = read(); draw() })
  addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light" })
  addEventListener("afterprint", draw)
  addEventListener("resize", () => { if (fitCharts()) draw() })
  DARK.addEventListener("change", draw)
  document.getElementById("language").addEventListener("click", turnLanguage)
  document.getElementById("theme").addEventListener("click", turnTheme)
  state = read()
  draw()
}
