/** Where this server's viewer and API are. The script lies at `PREFIX/ui/assets/VERSION/app.js`, whatever PREFIX a
 * reverse proxy adds. */

const viewer = new URL("../../", import.meta.url);

/** `/ui/`, below the proxy's prefix. Ends with a slash. */
export const viewerPath = viewer.pathname;

/** The control API's address. Ends with a slash. */
export const apiUrl = new URL("../", viewer).href;

/** Whether a directory is looked at, with no server behind it: no engine, no sandbox, nothing that changes. */
export const ofDirectory = document.documentElement.dataset["served"] === "directory";
