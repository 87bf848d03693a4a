/** The viewer's start: takes the key out of the address first, then draws. */

import { render } from "preact";
import { App } from "./App";
import "./style.css";
import { keepPagePlace } from "./scroll";
import { openSession } from "./session";

await openSession();
keepPagePlace();
const root = document.getElementById("app");
if (root) render(<App />, root);
