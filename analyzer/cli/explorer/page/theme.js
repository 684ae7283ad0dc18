// Sets the theme before the page is drawn.
"use strict";
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
