// Functions that the scripts for Node share.

// Values from the test: as in harness.py.
export const given = JSON.parse(process.argv[2]);

export const joined = (pieces) => ({ text: pieces.join(""), pieces: pieces.filter((piece) => piece) });

export function check(holds, message) {
  if (!holds) throw new Error(message);
}

// Describe the exception that a call must raise.
export async function caught(ask) {
  try {
    await ask();
  } catch (error) {
    return { types: [error.constructor.name], message: error.message };
  }
  throw new Error("it was answered");
}

// Run every part of every kind, and print what each returned or raised. The kinds are those of test_clients.py.
export async function report(kinds) {
  const said = {};
  for (const [kind, parts] of Object.entries(kinds)) {
    said[kind] = {};
    for (const [name, part] of Object.entries(parts)) {
      try {
        said[kind][name] = { returned: await part() };
      } catch (error) {
        said[kind][name] = { raised: [error.stack, error.responseBody, JSON.stringify(error.requestBodyValues)].join("\n") };
      }
    }
  }
  console.log("\n" + JSON.stringify(said));
}
