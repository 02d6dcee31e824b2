// Formulas are in elements of the class "formula", between backquotes.
window.MathJax = {
  loader: {load: ["core", "input/asciimath", "output/svg"]},
  options: {
    ignoreHtmlClass: "md-container",
    processHtmlClass: "formula",
  },
};
