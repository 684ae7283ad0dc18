// Runs the program in Pyodide: loads Python and the package once, then answers questions.

const ANSWER = `
import json
from analyzer.cli.explorer.answer import answer

def answer_text(text):
    try:
        return json.dumps(answer(json.loads(text)))
    except Exception as error:
        return json.dumps({"error": f"internal error: {type(error).__name__}: {error}"[:300]})

answer_text
`;
let answerText = null;

async function start({pyodide, archive}) {
  const step = (text) => postMessage({step: text});
  step("Loading Python …");
  const folder = new URL(pyodide, location.href).href;
  const [{loadPyodide}, data] = await Promise.all([
    import(`${folder}pyodide.mjs`),
    fetch(archive).then((response) => response.arrayBuffer()),
  ]);
  const python = await loadPyodide({indexURL: folder, checkAPIVersion: false});
  step("Loading the program …");
  python.unpackArchive(data, "zip", {extractDir: "/program"});
  python.runPython("import sys; sys.path.insert(0, '/program'); sys.dont_write_bytecode = True");
  answerText = python.runPython(ANSWER);
}

onmessage = async ({data}) => {
  if (data.settings) {
    try {
      await start(data.settings);
      postMessage({ready: true});
    } catch (error) {
      postMessage({failed: String(error).slice(0, 300)});
    }
    return;
  }
  postMessage({number: data.number, answer: answerText(data.question)});
};
