// Preact's parts that the console uses, its hooks and htm, as one file.
export { createContext, h, render } from "preact";
export { useCallback, useContext, useEffect, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
export { default as htm } from "htm";
