// Markdown as nodes. HTML in it stays text; links lead to http(s) and mailto only; no images.
import { html } from "../../lib/html.js";
import { Lexer } from "../../vendor/marked.mjs";

const MAX_LENGTH = 200_000;
const MAX_DEPTH = 12;
const LINK = /^(https?:|mailto:)/i;

/** @param {{text: string}} props */
export function Markdown({ text }) {
  if (text.length > MAX_LENGTH) return html`<pre>${text}</pre>`;
  let tokens;
  try {
    tokens = Lexer.lex(text);
  } catch {
    return html`<pre>${text}</pre>`; // nested deeper than the parser can
  }
  return html`<div class="rendered">${nodes(tokens, 0)}</div>`;
}

const nodes = (tokens, depth) => tokens.map((token) => node(token, depth + 1));

function node(token, depth) {
  if (depth > MAX_DEPTH) return token.raw;
  const inner = token.tokens ? nodes(token.tokens, depth) : token.text;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<p class="heading">${inner}</p>`;
    case "paragraph":
      return html`<p>${inner}</p>`;
    case "code":
      return html`<pre><code>${token.text}</code></pre>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "strong":
      return html`<strong>${inner}</strong>`;
    case "em":
      return html`<em>${inner}</em>`;
    case "del":
      return html`<del>${inner}</del>`;
    case "br":
      return html`<br />`;
    case "hr":
      return html`<hr />`;
    case "blockquote":
      return html`<blockquote>${inner}</blockquote>`;
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "link":
      return LINK.test(token.href)
        ? html`<a href=${token.href} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>`
        : token.raw;
    case "text":
      return inner;
    default:
      // Images, HTML, and whatever else there is: as it was written.
      return token.type === "escape" ? token.text : token.raw;
  }
}

function list({ ordered, start, items }, depth) {
  const entries = items.map((item) => html`<li>${nodes(item.tokens, depth)}</li>`);
  return ordered ? html`<ol start=${start}>${entries}</ol>` : html`<ul>${entries}</ul>`;
}

function table({ header, rows }, depth) {
  return html`<table>
    <thead><tr>${header.map((cell) => html`<th>${nodes(cell.tokens, depth)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${nodes(cell.tokens, depth)}</td>`)}</tr>`)}</tbody>
  </table>`;
}
