// Start of the page.
import { html, render } from "./lib/html.js";
import { load, preferred } from "./lib/texts.js";
import { Shell } from "./shell.js";
import { applyTheme } from "./theme.js";

applyTheme();
await load(preferred());
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${Shell} />`, app);
