/* The page Rates. jQuery is Flower's own. */
/*global $, delaysShared */

(function () {
    "use strict";

    var shared = delaysShared,
        isolated = shared.isolated, number = shared.number, displayed = shared.displayed,
        more = false;           // there are other lines

    function byId(id) {
        return document.getElementById("rates-" + id);
    }

    function sum(lines, what) {
        return lines.reduce(function (so_far, line) { return so_far + Number(what(line)); }, 0);
    }

    function rows(found) {
        var lines = found.lines,
            slots = lines.map(function (line) { return line.next_slot_us; }).filter(Boolean),
            held = sum(lines, function (line) { return line.held_until_us !== null; }),
            least = found.more ? "\u2265\u00a0" : "";
        more = found.more;
        byId("waiting").textContent = least + number(sum(lines, function (line) { return line.waiting; }));
        byId("next").textContent = slots.length ?
            shared.untilInWords(Math.min.apply(null, slots)).replace(/^in /, "") : "\u2014";
        byId("lines").textContent = least + number(lines.length);
        byId("held").textContent = least + number(held);
        $(byId("held-card")).toggleClass("metric-card-danger", held > 0);
        lines.forEach(function (line) {
            line.id = "line-" + encodeURIComponent(JSON.stringify([line.task, line.key]));
        });
        return lines;
    }

    function slot(us, line) {
        var held = line.held_until_us;
        return held === null ? shared.timeUntil(us) :
            "<span>" + shared.untilInWords(us === null ? held : us) + "</span> " +
                '<span class="rates-held">' + shared.timeTag(held, "held until ") + "</span>";
    }

    function used(share, line) {
        var percent = Math.round(share * 100) + "\u00a0%",
            starts = number(line.starts_last_period) + (line.starts_last_period === 1 ? " start" : " starts");
        return '<span class="rates-used"><span class="rates-bar" aria-hidden="true"><span style="width: ' +
            Math.min(100, share * 100) + '%"></span></span><span>' + percent + "</span><small>" + starts +
            "</small></span>";
    }

    $(function () {
        shared.list("rates", "lines", ["waiting", "next", "lines", "held"], rows, {
            order: [[3, "desc"]],
            language: {searchPlaceholder: "task or key"},
            infoCallback: function (settings, start, end, max, total, text) {
                return more ? text + " The longest lines are listed." : text;
            },
            columns: [{
                data: "task", className: "rates-task", render: displayed(shared.taskLink)
            }, {
                data: "key", className: "rates-key",
                render: displayed(function (key) { return key === null ? "\u2014" : isolated(key); })
            }, {
                data: "rate", className: "rates-rate",
                render: displayed(function (rate, line) {
                    return isolated(rate) + (line.overridden ? " <small>overridden</small>" : "");
                })
            }, {
                data: "waiting", className: "rates-waiting", searchable: false, render: displayed(number)
            }, {
                data: "next_slot_us", className: "rates-slot delays-due", searchable: false, render: displayed(slot)
            }, {
                data: "utilisation", className: "rates-share", searchable: false, render: displayed(used)
            }]
        });
    });
}());
