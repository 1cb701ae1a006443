/* The page Runs. jQuery and Bootstrap are Flower's own. */
/*global $, bootstrap, delaysShared */

(function () {
    "use strict";

    var page = document.getElementById("runs-page"),
        shared = delaysShared,
        isolated = shared.isolated, displayed = shared.displayed,
        CONSEQUENCE = {
            cancel: "No task of it starts any more. Workers announce each as revoked when it is due.",
            reschedule: "All its waiting tasks move, one after another."
        },
        asked = null,           // the run that the dialog asks about
        list, dialog;

    function byId(id) {
        return document.getElementById("runs-" + id);
    }

    function rows(found) {
        found.runs.forEach(function (run) {
            run.id = "run-" + encodeURIComponent(run.run_id);
            run.began_us = Date.parse(run.began) * 1000;
            run.state = run.cancelled ? "cancelled" :
                run.moved_seconds ? "moved by " + shared.duration(Math.abs(run.moved_seconds)) : "";
        });
        return found.runs;
    }

    function link(run_id) {
        var search = 'run:"' + run_id.replace(/["\\]/g, "\\$&") + '"';
        return '<a href="' + page.dataset.delays + "?" + $.param({search: search}) + '">' + isolated(run_id) + "</a>";
    }

    function button(verb, text, kind, run) {
        return '<button type="button" class="btn btn-sm btn-outline-' + kind + '" data-change="' + verb +
            '" aria-label="' + shared.escapeHtml(text + " run " + run.run_id) + '"' +
            (run.cancelled ? " disabled" : "") + ">" + text + "</button>";
    }

    function buttons(id, run) {
        return '<span class="delays-buttons">' + button("reschedule", "Reschedule", "secondary", run) +
            button("cancel", "Cancel", "danger", run) + "</span>";
    }

    function ask(verb, run) {
        var words = verb === "cancel" ? "Cancel" : "Reschedule";
        asked = {verb: verb, run: run};
        byId("form").reset();
        byId("question").innerHTML = words + " run " + isolated(run.run_id) + "?";
        byId("consequence").textContent = CONSEQUENCE[verb];
        byId("wrong").textContent = "";
        $(byId("when")).toggleClass("d-none", verb === "cancel");
        $(byId("yes")).text(words + " run").toggleClass("btn-danger", verb === "cancel")
            .toggleClass("btn-primary", verb !== "cancel");
        dialog.show();
    }

    function confirmed(event) {
        event.preventDefault();
        $(byId("yes")).prop("disabled", true);
        shared.post(asked.verb, {run: asked.run.run_id, by: byId("by").value.trim()}).done(function (answer) {
            dialog.hide();
            shared.toast(answer.message, "success");
        }).fail(function (xhr) {
            byId("wrong").textContent = shared.sayWhy(xhr);
        }).always(function () {
            $(byId("yes")).prop("disabled", false);
            list.refresh();
        });
    }

    $(function () {
        var columns = [
            {data: "run_id", render: displayed(link)},
            {data: "task", render: displayed(shared.taskLink)},
            {data: "began_us", searchable: false, render: displayed(function (us) { return shared.timeTag(us); })}
        ];
        ["planned", "sent", "rejected", "waiting", "left"].forEach(function (name) {
            columns.push({data: name, searchable: false, render: displayed(shared.number)});
        });
        columns.push({data: "state", render: displayed(isolated)});
        if (page.dataset.mayChange) {
            columns.push({data: "run_id", orderable: false, searchable: false, render: displayed(buttons)});
            dialog = new bootstrap.Modal(byId("dialog"));
            byId("dialog").addEventListener("shown.bs.modal", function () {
                byId(asked.verb === "cancel" ? "no" : "by").focus();
            });
            byId("dialog").addEventListener("hidden.bs.modal", function () {
                $(document.getElementById(asked.run.id)).find("[data-change=" + asked.verb + "]").trigger("focus");
            });
            $(byId("form")).on("submit", confirmed);
        }
        list = shared.list("runs", "runs", [], rows, {
            order: [],
            language: {searchPlaceholder: "run or task"},
            columns: columns,
            createdRow: function (row) {        // phones show a heading in each cell
                $("#runs-table th").each(function (at) { row.cells[at].dataset.heading = $(this).text(); });
            }
        });
        $("#runs-table").on("click", "[data-change]", function () {
            ask(this.dataset.change, list.table.row($(this).closest("tr")).data());
        });
    });
}());
