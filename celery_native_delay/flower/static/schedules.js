/* The page Schedules. jQuery and Bootstrap are Flower's own. */
/*global $, bootstrap, delaysShared */

(function () {
    "use strict";

    var page = document.getElementById("schedules-page"),
        shared = delaysShared,
        escapeHtml = shared.escapeHtml, isolated = shared.isolated, displayed = shared.displayed,
        DONE = {pause: " is paused", resume: " runs at its times again", "run-now": " runs once more",
            add: " is added", change: " is changed", remove: " is removed"},
        LATE_SECONDS = 60,
        asked = null,           // the entry that the dialog asks about
        list, dialog, editor;

    function byId(id) {
        return document.getElementById("schedules-" + id);
    }

    function microseconds(time) {
        return time === null ? null : Date.parse(time) * 1000;
    }

    function rows(found) {
        var entries = found.entries, due, late;
        entries.forEach(function (entry) {
            entry.id = "entry-" + encodeURIComponent(entry.name);
            entry.last_us = microseconds(entry.last_run);
            entry.due_us = microseconds(entry.next_due);
        });
        due = entries.map(function (entry) { return entry.due_us; }).filter(function (us) {
            return us && shared.untilInWords(us) !== "now";     // late entries have their own number
        });
        late = entries.filter(function (entry) { return entry.late_seconds >= LATE_SECONDS; }).length;
        byId("entries").textContent = shared.number(entries.length);
        byId("next").textContent = due.length ?
            shared.untilInWords(Math.min.apply(null, due)).replace(/^in /, "") : "\u2014";
        byId("paused").textContent = shared.number(
            entries.filter(function (entry) { return entry.is_paused; }).length);
        byId("late").textContent = shared.number(late);
        $(byId("late-card")).toggleClass("metric-card-danger", late > 0);
        return entries;
    }

    function lastRun(us) {
        return us === null ? "\u2014" : '<span title="' + shared.clock(us) + '">' +
            shared.inWords(us).replace(/^in .*/, "now") + "</span>";
    }

    function nextDue(us, entry) {
        if (entry.problem) {
            return isolated(entry.problem);
        }
        return us === null ? "<span>" + (entry.is_paused ? "paused" : "ended") + "</span>" : shared.timeUntil(us);
    }

    function late(seconds) {
        return seconds < 1 ? "\u2014" : '<span class="' + (seconds >= LATE_SECONDS ? "is-late" : "") + '">' +
            shared.duration(seconds) + "</span>";
    }

    function button(verb, text, label) {
        return '<button type="button" class="btn btn-sm btn-outline-secondary" data-change="' + verb +
            '" aria-label="' + escapeHtml(label) + '">' + text + "</button>";
    }

    function buttons(name, entry) {
        return '<span class="delays-buttons">' +
            (entry.is_paused ? button("resume", "Resume", "Resume " + name) : button("pause", "Pause", "Pause " + name)) +
            button("run-now", "Run now", "Run " + name + " now") + (entry.is_added ?
            button("change", "Change\u2026", "Change " + name) + button("remove", "Remove\u2026", "Remove " + name) : "") +
            "</span>";
    }

    function change(verb, fields) {
        return shared.post(verb, fields).done(function () {
            shared.toast(shared.visible(fields.name) + DONE[verb], "success");
        }).always(list.refresh);
    }

    function changeNow(verb, name) {
        change(verb, {name: name}).fail(function (xhr) {
            shared.toast(shared.sayWhy(xhr), "danger");
        });
    }

    function ask(verb, entry) {
        var isRemove = verb === "remove";
        asked = $.extend({verb: verb}, entry);
        byId("question").innerHTML = (isRemove ? "Remove " : "Run ") + isolated(entry.name) + (isRemove ? "?" : " now?");
        byId("consequence").innerHTML = isRemove ? "It never runs again, and its waiting run is removed." :
            isolated(entry.task) + " runs once more. The next due time stays.";
        $(byId("yes")).text(isRemove ? "Remove" : "Run now");
        dialog.show();
    }

    // ---- add and change -------------------------------------------------------------------

    function edit(entry) {
        asked = $.extend({verb: entry ? "change" : "add", id: ""}, entry);
        byId("edit-form").reset();
        byId("edit-title").innerHTML = entry ? "Change " + isolated(entry.name) : "Add an entry";
        $(byId("edit-yes")).text(entry ? "Change" : "Add");
        $("#schedules-edit-name").prop("disabled", Boolean(entry)).val(entry ? entry.name : "");
        $("#schedules-edit-task").val(entry ? entry.task : "");
        $("#schedules-edit-schedule").val(entry ? entry.schedule : "");
        $("#schedules-edit-args, #schedules-edit-kwargs").attr("placeholder", entry ? "as they are" : "none");
        byId("edit-error").textContent = "";
        editor.show();
    }

    function edited(event) {
        var fields = {name: byId("edit-name").value};
        event.preventDefault();
        byId("edit-error").textContent = "";
        try {
            ["task", "schedule", "args", "kwargs"].forEach(function (field) {
                var text = byId("edit-" + field).value.trim(), isJson = /args$/.test(field);
                if (text && text !== asked[field]) {
                    fields[field] = isJson ? JSON.parse(text) : text;
                }
            });
        } catch (error) {
            byId("edit-error").textContent = "Arguments are JSON, such as [7] and {\"user\": 7}: " + error.message;
            return;
        }
        change(asked.verb, fields).done(function () { editor.hide(); }).fail(function (xhr) {
            byId("edit-error").textContent = shared.sayWhy(xhr);
        });
    }

    $(function () {
        var columns = [{
            data: "name", className: "schedules-name", type: "string", render: displayed(isolated)
        }, {
            data: "task", className: "schedules-task", render: displayed(shared.taskLink)
        }, {
            data: "schedule", className: "schedules-schedule", render: displayed(function (words, entry) {
                return isolated(words) + (entry.is_added ? " <small>added here</small>" : "");
            })
        }, {
            data: "last_us", className: "schedules-last delays-due", searchable: false, render: displayed(lastRun)
        }, {
            data: "due_us", className: "schedules-next delays-due", searchable: false, render: displayed(nextDue)
        }, {
            data: "runs", className: "schedules-runs", searchable: false, render: displayed(shared.number)
        }, {
            data: "late_seconds", className: "schedules-late", searchable: false, render: displayed(late)
        }];
        if (page.dataset.mayChange) {
            columns.push({data: "name", className: "schedules-change", orderable: false, searchable: false,
                render: displayed(buttons)});
            dialog = new bootstrap.Modal(byId("dialog"));
            byId("dialog").addEventListener("shown.bs.modal", function () { byId("no").focus(); });
            byId("dialog").addEventListener("hidden.bs.modal", function () {
                $(document.getElementById(asked.id)).find("[data-change=" + asked.verb + "]").trigger("focus");
            });
            $(byId("form")).on("submit", function (event) {
                event.preventDefault();
                dialog.hide();
                changeNow(asked.verb, asked.name);
            });
            editor = new bootstrap.Modal(byId("edit"));
            byId("edit").addEventListener("shown.bs.modal", function () {
                byId(asked.verb === "add" ? "edit-name" : "edit-schedule").focus();
            });
            byId("edit").addEventListener("hidden.bs.modal", function () {
                (document.querySelector("#" + CSS.escape(asked.id || "none") + " [data-change=change]") || byId("add")).focus();
            });
            $(byId("edit-form")).on("submit", edited);
            $(byId("add")).on("click", function () { edit(null); });
        }
        list = shared.list("schedules", "entries", ["entries", "next", "paused", "late"], rows, {
            order: [[0, "asc"]],
            language: {searchPlaceholder: "name, task or schedule"},
            columns: columns
        });
        $("#schedules-table").on("click", "[data-change]", function () {
            var entry = list.table.row($(this).closest("tr")).data();
            if (this.dataset.change === "change") {
                edit(entry);
            } else if (/^r(un-now|emove)$/.test(this.dataset.change)) {
                ask(this.dataset.change, entry);
            } else {
                changeNow(this.dataset.change, entry.name);
            }
        });
    });
}());
