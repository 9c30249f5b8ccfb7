// Search takes a leading hyphen for "without this word"; here it begins an option's name, such as --budget.
const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  if (message && message.type === 2 && typeof message.data === "string")
    message = { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") }
  return post.call(this, message, ...rest)
}
