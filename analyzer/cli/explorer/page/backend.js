// Who answers the questions of the page: the local server, or the program itself in a worker with Pyodide.
// A backend has ask(question), which gives the answer of analyzer.cli.explorer.answer; search(question) and stop(), for a search that
// runs beside other questions; and text, which says who it is.

export async function backend(progress) {
  const settings = await (await fetch("backend.json")).json();
  if (settings.backend === "server") return new Server();
  const found = new InBrowser(settings, progress);
  await found.ready;
  return found;
}

class Server {
  text = "The figures come from the program on this machine.";

  async #post(path, question) {
    let response;
    try {
      response = await fetch(path, {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question)});
    } catch {
      return {error: "the local server does not answer; start get-training-info explore again"};
    }
    return response.ok ? response.json() : {error: `the local server refused the question (${response.status})`};
  }

  ask(question) { return this.#post("answer", question); }
  search(question) { return this.#post("answer", question); }
  stop() { return this.#post("stop", {}); }
}

class InBrowser {
  text = "The figures are computed in this browser (Pyodide). Nothing is sent.";

  constructor(settings, progress) {
    this.settings = settings;
    this.worker = new Calls(settings, progress);
    this.ready = this.worker.ready;
    this.searcher = null;
  }

  ask(question) { return this.worker.call(question); }

  async search(question) {
    await this.stop();
    const searcher = new Calls(this.settings, () => {});
    this.searcher = searcher;
    await searcher.ready;
    const answer = this.searcher === searcher ? await searcher.call(question) : {stopped: true};
    if (this.searcher === searcher) await this.stop();
    return answer;
  }

  async stop() {
    const searcher = this.searcher;
    this.searcher = null;
    if (searcher) searcher.end();
  }
}

/** A worker that answers one question after the other. */
class Calls {
  #open = new Map();
  #number = 0;

  constructor(settings, progress) {
    this.worker = new Worker("worker.js", {type: "module"});
    this.ready = new Promise((done, failed) => {
      this.worker.onmessage = ({data}) => {
        if (data.step) progress(data.step);
        else if (data.ready) done();
        else if (data.failed) failed(new Error(data.failed));
        else { this.#open.get(data.number)(JSON.parse(data.answer)); this.#open.delete(data.number); }
      };
      this.worker.onerror = (event) => { event.preventDefault(); failed(new Error(event.message || "the worker could not be started")); };
    });
    this.worker.postMessage({settings});
  }

  call(question) {
    const number = this.#number += 1;
    return new Promise((done) => {
      this.#open.set(number, done);
      this.worker.postMessage({number, question: JSON.stringify(question)});
    });
  }

  end() {
    this.worker.terminate();
    for (const done of this.#open.values()) done({stopped: true});
    this.#open.clear();
  }
}
