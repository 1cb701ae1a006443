/* What our pages have in common. jQuery, DataTables, Bootstrap and moment are Flower's own. */
/*global $, bootstrap, moment */

var delaysShared = (function () {
    "use strict";

    var page = document.querySelector("[data-timezone]"),
        asked = page.dataset.timezone,
        zone = moment.tz.zone(asked) ? asked : "UTC",       // as Flower's own pages
        // What a terminal or a reader would obey instead of showing it: C0, C1, bidirectional, unseen.
        OBEYED = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
        FOCUSABLE = "a, button, input",
        REFRESH_MS = 2000,
        aheadUs = 0,            // of this browser's clock is Flower's, which says when a list was read
        held = null;            // row and place of the focus in a table, while it is drawn again

    function visible(text) {
        return String(text === null || text === undefined ? "" : text).replace(OBEYED, function (char) {
            return "\\u" + ("000" + char.charCodeAt(0).toString(16)).slice(-4);
        });
    }

    function escapeHtml(text) {
        return $("<i>").text(visible(text)).html().replace(/"/g, "&quot;");
    }

    // By itself: what is written from right to left does not turn what stands beside it.
    function isolated(text) {
        return "<bdi>" + escapeHtml(text).replace(/\./g, ".<wbr>") + "</bdi>";
    }

    function number(value) {
        return value === null || value === undefined ? "\u2014" : Number(value).toLocaleString("en");
    }

    function clock(us) {
        return moment(us / 1000).tz(zone).format("YYYY-MM-DD HH:mm:ss z");
    }

    function iso(us) {
        return new Date(us / 1000).toISOString();
    }

    function timeTag(us, before) {
        return '<time datetime="' + iso(us) + '" title="' + iso(us) + '">' + (before || "") + clock(us) + "</time>";
    }

    function duration(seconds) {
        var parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]],
            rest = Math.floor(seconds), words = [];
        parts.forEach(function (part) {
            var count = Math.floor(rest / part[0]);
            rest -= count * part[0];
            if (count && words.length < 2) {
                words.push(count + " " + part[1]);
            }
        });
        return words.join(" ") || Math.round(seconds * 1000) + " ms";
    }

    function inWords(us) {
        var seconds = Math.round((us / 1000 - Date.now()) / 1000);
        if (!seconds) {
            return "now";
        }
        return seconds < 0 ? duration(-seconds) + " ago" : "in " + duration(seconds);
    }

    function sayWhy(xhr) {
        var body = xhr.responseJSON;
        if (body && body.error) {
            return body.error;
        }
        return xhr.status ? "Flower answered " + xhr.status + ": " + (xhr.responseText || xhr.statusText)
            .replace(/<[^>]*>/g, " ").trim().slice(0, 300) : "Flower does not answer";
    }

    function live(is) {
        $("#delays-dot").toggleClass("status-dot-live", is).toggleClass("status-dot-error", !is);
        document.getElementById("delays-live").textContent = is ? "Live" : "No answer";
    }

    function noteFocus() {
        var row = document.activeElement && document.activeElement.closest(".tasks-table tbody tr");
        held = row && [row.id, $(row).find(FOCUSABLE).index(document.activeElement)];
    }

    function giveFocusBack() {
        var row = held && document.getElementById(held[0]),
            found = row && $(row).find(FOCUSABLE)[held[1]];
        if (found) {
            found.focus({preventScroll: true});
        }
    }

    function toast(message, kind) {
        var element = $('<div class="toast align-items-center border-0" aria-atomic="true">')
            .addClass("text-bg-" + kind)
            .attr("role", kind === "danger" ? "alert" : "status")
            .append($('<div class="d-flex">')
                .append($('<div class="toast-body">').text(message))
                .append('<button type="button" class="btn-close btn-close-white me-2 m-auto"' +
                    ' data-bs-dismiss="toast" aria-label="Close"></button>'));
        $("#toast-container").append(element);
        element.on("hidden.bs.toast", function () { element.remove(); });
        new bootstrap.Toast(element[0], {delay: kind === "danger" ? 10000 : 5000}).show();
    }

    function post(verb, body) {
        return $.ajax({type: "POST", url: page.getAttribute("data-" + verb),
            contentType: "application/json", data: JSON.stringify(body)});
    }

    // ---- a page with one list, which is read again and again: Rates, Schedules -------------

    function untilInWords(us) {
        return us <= Date.now() * 1000 + aheadUs ? "now" : inWords(us - aheadUs);
    }

    function timeUntil(us) {
        return us === null ? "\u2014" : "<span>" + untilInWords(us) + "</span> " + timeTag(us);
    }

    // Tables sort and search by the values themselves.
    function displayed(render) {
        return function (value, type, row) { return type === "display" ? render(value, row) : value; };
    }

    function taskLink(task) {
        return '<a href="' + page.dataset.delays + "?" + $.param({search: "name:" + task}) + '">' +
            isolated(task) + "</a>";
    }

    // *rows* gets an answer, writes numbers on the cards, and returns the rows of the table.
    function list(name, noun, cards, rows, options) {
        var table = $("#" + name + "-table").DataTable($.extend(true, {
                rowId: "id", autoWidth: false,
                dom: "frt<'dt-footer'lip>",
                lengthMenu: [15, 30, 50, 100], pageLength: 15,
                language: {
                    lengthMenu: "_MENU_",
                    info: "Showing _START_ to _END_ of _TOTAL_ " + noun,
                    infoEmpty: "No " + noun + " to show",
                    infoFiltered: "(filtered from _MAX_ " + noun + ")",
                    search: '<span class="visually-hidden">Search ' + noun + "</span>",
                    emptyTable: page.dataset.none,
                    zeroRecords: "No " + noun + " match."
                },
                initComplete: function () {
                    $("#" + name + "-table_length select").attr("aria-label", noun + " per page");
                },
                preDrawCallback: noteFocus,
                drawCallback: giveFocusBack
            }, options));

        function refresh() {
            return $.getJSON(page.dataset.list).done(function (found) {
                aheadUs = found.now_us - Date.now() * 1000;
                $("#delays-error").addClass("d-none");
                $("#" + name + "-list").removeClass("d-none");
                table.clear().rows.add(rows(found)).draw(false);
                live(true);
            }).fail(function (xhr) {
                // What was told before may be true no longer.
                cards.forEach(function (card) { $("#" + name + "-" + card).text("\u2014"); });
                $("#" + name + "-page .metric-card-danger").removeClass("metric-card-danger");
                $("#" + name + "-list").addClass("d-none");
                $("#delays-error").removeClass("d-none").text(sayWhy(xhr));
                live(false);
            });
        }

        (function again() {
            refresh().always(function () { setTimeout(again, REFRESH_MS); });
        }());
        return {table: table, refresh: refresh};
    }

    $.fn.dataTable.ext.errMode = "none";

    return {
        toast: toast, post: post, untilInWords: untilInWords, timeUntil: timeUntil,
        displayed: displayed, taskLink: taskLink, list: list,
        zone: zone, visible: visible, escapeHtml: escapeHtml, isolated: isolated, number: number, clock: clock, iso: iso,
        timeTag: timeTag, duration: duration, inWords: inWords, sayWhy: sayWhy, live: live,
        noteFocus: noteFocus, giveFocusBack: giveFocusBack
    };
}());
