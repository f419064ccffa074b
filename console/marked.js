// The lexer of marked alone: the console makes nodes of its tokens, never HTML.
export { _Lexer as Lexer } from "./node_modules/marked/src/Lexer.ts";
