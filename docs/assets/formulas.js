// Sets formulas with the copy of KaTeX beside this file. Pages without a formula load nothing.
(() => {
  const formulas = document.querySelectorAll(".arithmatex")
  if (!formulas.length) return
  const here = new URL("katex/", document.currentScript.src)
  const style = document.createElement("link")
  style.rel = "stylesheet"
  style.href = new URL("katex.min.css", here)
  const script = document.createElement("script")
  script.src = new URL("katex.min.js", here)
  script.onload = () => formulas.forEach(formula => {
    const text = formula.textContent
    katex.render(text.slice(2, -2), formula, {displayMode: text.startsWith("\\["), throwOnError: false})
  })
  document.head.append(style, script)
})()
