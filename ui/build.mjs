// Bundles the viewer: `node build.mjs FOLDER` writes app.js, app.css, index.html and LICENSES.txt there.
// The same sources and versions give the same bytes, which `make ui-check` relies on.
import { build } from "esbuild";
import { copyFile, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2];
if (!folder) throw new Error("usage: node build.mjs FOLDER");

await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: folder,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none", // LICENSES.txt has them whole
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
});

const { dependencies } = JSON.parse(await readFile(join(here, "package.json"), "utf8"));
const licences = Object.keys(dependencies).map(
  async (name) => `${name}\n\n${await readFile(join(here, "node_modules", name, "LICENSE"), "utf8")}`,
);
await writeFile(join(folder, "LICENSES.txt"), (await Promise.all(licences)).join("\n"));
await copyFile(join(here, "src/index.html"), join(folder, "index.html"));
