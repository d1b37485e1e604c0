// Elements without innerHTML: whatever a device says is a text node. `morph` changes what is on the screen into what a
// view has made, element by element, so that the focus, open details and the place on the page stay.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit"];

function fill(node, props, kids) {
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) node[name] = value;
    else if (name === "grow") node.style.flexGrow = value;
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  for (const kid of kids.flat(9)) if (kid != null && kid !== false) node.append(kid.nodeType ? kid : String(kid));
  return node;
}

export const h = (tag, props, ...kids) => fill(document.createElement(tag), props, kids);
export const s = (tag, props, ...kids) => fill(document.createElementNS(SVG, tag), props, kids);

export function morph(parent, nodes) {
  const wanted = nodes.flat(9).filter(node => node != null && node !== false)
    .map(node => node.nodeType ? node : document.createTextNode(String(node)));
  morphChildren(parent, wanted);
}

function keyOf(node) {
  return node.nodeType === 1 ? node.getAttribute("data-key") : null;
}

function morphChildren(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
  let at = parent.firstChild;
  for (const want of wanted) {
    const key = keyOf(want);
    const have = key ? keyed.get(key) : at && !keyOf(at) ? at : null;
    if (have && have.nodeName === want.nodeName && have.nodeType === want.nodeType && keyOf(have) === key) {
      if (have !== at) parent.insertBefore(have, at); else at = at.nextSibling;
      morphNode(have, want);
    } else parent.insertBefore(want, at);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

function morphNode(have, want) {
  if (have.nodeType === 3) { if (have.data !== want.data) have.data = want.data; return; }
  if (have.nodeType !== 1) return;
  for (const { name, value } of want.attributes) {
    if (name === "style") have.style.cssText = want.style.cssText; // as an attribute the policy forbids it
    else if (have.getAttribute(name) !== value) have.setAttribute(name, value);
  }
  for (const { name } of [...have.attributes]) {
    if (!want.hasAttribute(name) && !(name === "open" && have.nodeName === "DETAILS")) have.removeAttribute(name);
  }
  for (const name of HANDLERS) if (have[name] !== want[name]) have[name] = want[name];
  if (have.nodeName === "INPUT" || have.nodeName === "TEXTAREA") return;
  if (have.nodeName === "SELECT") {
    const chosen = have.value;
    morphChildren(have, [...want.childNodes]);
    have.value = document.activeElement === have ? chosen : want.value;
    return;
  }
  morphChildren(have, [...want.childNodes]);
}
