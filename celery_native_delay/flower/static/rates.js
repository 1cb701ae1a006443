/* The page Rates. jQuery, DataTables and moment are Flower's own. */
/*global $, delaysShared */

(function () {
    "use strict";

    var page = document.getElementById("rates-page"),
        shared = delaysShared,
        isolated = shared.isolated, number = shared.number,
        REFRESH_MS = 2000,
        aheadUs = 0,            // of this browser's clock is Flower's, by which slots are told
        more = false,           // there are other queues
        table;

    function byId(id) {
        return document.getElementById("rates-" + id);
    }

    function nowUs() {
        return Date.now() * 1000 + aheadUs;
    }

    function inWords(us) {
        return us <= nowUs() ? "now" : shared.inWords(us - aheadUs);
    }

    function sum(lines, what) {
        return lines.reduce(function (so_far, line) { return so_far + Number(what(line)); }, 0);
    }

    function showNumbers(lines) {
        var slots = lines.map(function (line) { return line.next_slot_us; }).filter(Boolean),
            held = sum(lines, function (line) { return line.held_until_us !== null; }),
            least = more ? "\u2265\u00a0" : "";
        byId("waiting").textContent = least + number(sum(lines, function (line) { return line.waiting; }));
        byId("next").textContent = slots.length ?
            inWords(Math.min.apply(null, slots)).replace(/^in /, "") : "\u2014";
        byId("lines").textContent = least + number(lines.length);
        byId("held").textContent = least + number(held);
        $(byId("held-card")).toggleClass("metric-card-danger", held > 0);
    }

    function refresh() {
        return $.getJSON(page.dataset.lines).done(function (found) {
            aheadUs = found.now_us - Date.now() * 1000;
            more = found.more;
            found.lines.forEach(function (line) {
                line.id = "line-" + encodeURIComponent(JSON.stringify([line.task, line.key]));
            });
            $("#delays-error").addClass("d-none");
            $(byId("list")).removeClass("d-none");
            showNumbers(found.lines);
            table.clear().rows.add(found.lines).draw(false);
            shared.live(true);
        }).fail(function (xhr) {
            // What was told before may be true no longer.
            ["waiting", "next", "lines", "held"].forEach(function (id) { byId(id).textContent = "\u2014"; });
            $(byId("held-card")).removeClass("metric-card-danger");
            $(byId("list")).addClass("d-none");
            $("#delays-error").removeClass("d-none").text(shared.sayWhy(xhr));
            shared.live(false);
        });
    }

    // ---- table ----------------------------------------------------------------------------

    // Tables sort and search by the values themselves.
    function displayed(render) {
        return function (value, type, line) { return type === "display" ? render(value, line) : value; };
    }

    function slot(us, line) {
        var held = line.held_until_us;
        if (held !== null) {
            return "<span>" + inWords(us === null ? held : us) + "</span> " +
                '<span class="rates-held">' + shared.timeTag(held, "held until ") + "</span>";
        }
        return us === null ? "\u2014" : "<span>" + inWords(us) + "</span> " + shared.timeTag(us);
    }

    function used(share, line) {
        var percent = Math.round(share * 100) + "\u00a0%",
            starts = number(line.starts_last_period) + (line.starts_last_period === 1 ? " start" : " starts");
        return '<span class="rates-used"><span class="rates-bar" aria-hidden="true"><span style="width: ' +
            Math.min(100, share * 100) + '%"></span></span><span>' + percent + "</span><small>" + starts +
            "</small></span>";
    }

    function columns() {
        return [{
            data: "task", className: "rates-task",
            render: displayed(function (task) {
                return '<a href="' + page.dataset.delays + "?" + $.param({search: "name:" + task}) + '">' +
                    isolated(task) + "</a>";
            })
        }, {
            data: "key", className: "rates-key",
            render: displayed(function (key) { return key === null ? "\u2014" : isolated(key); })
        }, {
            data: "rate", className: "rates-rate", render: displayed(isolated)
        }, {
            data: "waiting", className: "rates-waiting", searchable: false, render: displayed(number)
        }, {
            data: "next_slot_us", className: "rates-slot delays-due", searchable: false, render: displayed(slot)
        }, {
            data: "utilisation", className: "rates-share", searchable: false, render: displayed(used)
        }];
    }

    $(function () {
        $.fn.dataTable.ext.errMode = "none";
        table = $("#rates-table").DataTable({
            rowId: "id", autoWidth: false, order: [[3, "desc"]],
            dom: "frt<'dt-footer'lip>",
            lengthMenu: [15, 30, 50, 100], pageLength: 15,
            language: {
                lengthMenu: "_MENU_",
                info: "Showing _START_ to _END_ of _TOTAL_ queues",
                infoEmpty: "No queues to show",
                infoFiltered: "(filtered from _MAX_ queues)",
                search: '<span class="visually-hidden">Search queues</span>',
                searchPlaceholder: "task or key",
                emptyTable: page.dataset.none,
                zeroRecords: "No queue matches."
            },
            initComplete: function () {
                $("#rates-table_length select").attr("aria-label", "Queues per page");
            },
            infoCallback: function (settings, start, end, max, total, text) {
                return more ? text + " The longest queues are listed." : text;
            },
            preDrawCallback: shared.noteFocus,
            drawCallback: shared.giveFocusBack,
            columns: columns()
        });
        (function again() {
            refresh().always(function () { setTimeout(again, REFRESH_MS); });
        }());
    });
}());
